/* Vectors of floats, for the C code of attention and of the layers: types, loads and stores of float32 and bfloat16, and 2 ** x.
 *
 * Included twice: without VARIANT for what is common, then with VARIANT(name) defined, for types and functions that are compiled
 * for one kind of CPU. LANES is then the number of floats in a register of it: wider vectors would be kept in memory.
 */

#ifndef VARIANT
#ifndef KVFERRY_VECTORS
#define KVFERRY_VECTORS

#include <stdint.h>

/* Compilers by which a function can be compiled for another CPU than the rest of its file, unless that is for a newer one. */
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__) && __GNUC__ >= 12 && !defined(__AVX__)
#define HAS_VARIANTS
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

#define UNROLL _Pragma("GCC unroll 4")
#define UNROLL_ALL _Pragma("GCC unroll 8")
#define SHUFFLE __builtin_shufflevector
#define WIDEST 16 /* the largest LANES: sizes are multiples */

/* The types of the kind of CPU for which a function is compiled. */
#define floats VARIANT(floats)
#define any_floats VARIANT(any_floats)
#define words VARIANT(words)
#define halves VARIANT(halves)
#define any_halves VARIANT(any_halves)

#endif
#else

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef float any_floats __attribute__((vector_size(4 * LANES), aligned(1), may_alias));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));
typedef uint16_t any_halves __attribute__((vector_size(2 * LANES), aligned(1), may_alias));

INLINE floats VARIANT(load)(const char *address, int64_t element, int is_bfloat16)
{
    if (!is_bfloat16)
        return *(const any_floats *)(address + 4 * element);
    words wide = __builtin_convertvector(*(const any_halves *)(address + 2 * element), words);
    return (floats)(wide << 16);
}

/* Round to nearest, ties to even; NaN stays NaN. The CPU's own instruction takes what is below 2 ** -126 for 0. */
INLINE void VARIANT(store)(char *address, int64_t element, floats values, int is_bfloat16)
{
    if (!is_bfloat16) {
        *(any_floats *)(address + 4 * element) = values;
        return;
    }
#if defined(__AVX512BF16__) && defined(HAS_VARIANTS)
    *(any_halves *)(address + 2 * element) = (halves)_mm512_cvtneps_pbh((__m512)values);
#else
    words bits = (words)values, is_nan = (words)(values != values);
    words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    *(any_halves *)(address + 2 * element) = __builtin_convertvector((rounded & ~is_nan) | (0x7fc0 & is_nan), halves);
#endif
}

/* The larger of two numbers; b if either is NaN, or both are 0: the CPU's instruction does the same. */
INLINE floats VARIANT(largest)(floats a, floats b)
{
#if defined(HAS_VARIANTS) && LANES == 16
    return (floats)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(HAS_VARIANTS) && LANES == 8
    return (floats)_mm256_max_ps((__m256)a, (__m256)b);
#else
    words is_larger = (words)(a > b);
    return (floats)(((words)a & is_larger) | ((words)b & ~is_larger));
#endif
}

/* 2 ** x for x <= 0, within 2 ** -22; NaN for NaN. */
INLINE floats VARIANT(exp2_of)(floats x)
{
    const float shifter = 12582912.0f; /* 1.5 * 2 ** 23: adding it rounds to an integer */
    x = VARIANT(largest)((floats){0} - 126.0f, x);
    floats shifted = x + shifter;
    floats rest = x - (shifted - shifter);
    floats power = rest * 1.5403530e-4f + 1.3333558e-3f;
    power = power * rest + 9.6181291e-3f;
    power = power * rest + 5.5504109e-2f;
    power = power * rest + 2.4022651e-1f;
    power = power * rest + 6.9314718e-1f;
    power = power * rest + 1.0f;
    return power * (floats)(((words)shifted + 127) << 23);
}

#endif
