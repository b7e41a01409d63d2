/* Functions compiled for several kinds of CPU: which of them a call runs. Included once by each file of kernels, after _vectors.h.
 *
 * The compiler lowers vectors to the instructions of the function that it parses, so each kind of CPU has its own copy of a file's
 * kernels. KERNELS names that file, from this folder; it is included here once for each kind, with VARIANT(name) defined, and LANES:
 * the floats of a register. Without HAS_VARIANTS there is one copy, for the CPU that the compiler was told.
 */

#if defined(__AVX512F__)
#define LANES_OF_ANY 16
#elif defined(__AVX2__)
#define LANES_OF_ANY 8
#else
#define LANES_OF_ANY 4
#endif

enum kind { ANY, X86_64_V3, X86_64_V4, X86_64_V4_BF16 };

static int newest_kind = X86_64_V4_BF16;

/* For tests: compute as on a CPU of this kind, if the machine's is not older. */
void kvferry_compute_as_on(int kind)
{
    newest_kind = kind;
}

static inline int is_at_least(int kind)
{
    if (kind > newest_kind)
        return 0;
#ifdef HAS_VARIANTS
    return kind == X86_64_V4_BF16 ? __builtin_cpu_supports("avx512bf16") != 0
        : kind == X86_64_V4       ? __builtin_cpu_supports("x86-64-v4") != 0
                                  : __builtin_cpu_supports("x86-64-v3") != 0;
#else
    return kind <= (LANES_OF_ANY == 16 ? X86_64_V4 : LANES_OF_ANY == 8 ? X86_64_V3 : ANY);
#endif
}

#define VARIANT(name) name##_for_any
#define LANES LANES_OF_ANY
#include KERNELS
#undef LANES
#undef VARIANT
#ifdef HAS_VARIANTS
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v3")
#define VARIANT(name) name##_for_v3
#define LANES 8
#include KERNELS
#undef LANES
#undef VARIANT
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v4")
#define VARIANT(name) name##_for_v4
#define LANES 16
#include KERNELS
#undef LANES
#undef VARIANT
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v4,avx512bf16")
#define VARIANT(name) name##_for_bf16
#define LANES 16
#include KERNELS
#undef LANES
#undef VARIANT
#pragma GCC pop_options
#define CALL_VARIANT(name, ...)                                                                                                \
    (is_at_least(X86_64_V4_BF16) ? name##_for_bf16(__VA_ARGS__)                                                                \
     : is_at_least(X86_64_V4)    ? name##_for_v4(__VA_ARGS__)                                                                  \
     : is_at_least(X86_64_V3)    ? name##_for_v3(__VA_ARGS__)                                                                  \
                                 : name##_for_any(__VA_ARGS__))
#else
#define CALL_VARIANT(name, ...) name##_for_any(__VA_ARGS__)
#endif
