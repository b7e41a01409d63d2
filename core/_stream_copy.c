/* A copy of memory that is not read again soon, past the caches: core/stream_copy.py loads this.
 *
 * Knows no Python: plain C, called by ctypes with the interpreter lock released. A store past the caches does not read the line
 * that it replaces, and evicts nothing that the model needs. The prefetch crosses into the next page of the source, so that its
 * translation is looked up before its first byte is needed: memory files have small pages on most systems. On other machines than
 * x86-64 this is memcpy.
 */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <emmintrin.h>

enum { LINE = 64, VECTOR = 16, AHEAD = 4096, SHORTEST = 16384 };

static size_t stream_lines(char *to, const char *from, size_t num_bytes)
{
    size_t done = 0;
    for (; done + LINE <= num_bytes; done += LINE) {
        const __m128i *source = (const __m128i *)(from + done);
        __m128i *target = (__m128i *)(to + done);
        __m128i first = _mm_loadu_si128(source), second = _mm_loadu_si128(source + 1);
        __m128i third = _mm_loadu_si128(source + 2), fourth = _mm_loadu_si128(source + 3);
        _mm_prefetch(from + done + AHEAD, _MM_HINT_T0); /* past the end of the source it does nothing */
        _mm_stream_si128(target, first);
        _mm_stream_si128(target + 1, second);
        _mm_stream_si128(target + 2, third);
        _mm_stream_si128(target + 3, fourth);
    }
    _mm_sfence(); /* another thread that learns of the copy sees all of it */
    return done;
}
#endif

/* The regions do not overlap. */
void kvferry_stream_copy(char *to, const char *from, size_t num_bytes)
{
    size_t done = 0;
#if defined(__x86_64__)
    if (num_bytes >= SHORTEST) {
        done = -(uintptr_t)to % VECTOR;
        memcpy(to, from, done);
        done += stream_lines(to + done, from + done, num_bytes - done);
    }
#endif
    memcpy(to + done, from + done, num_bytes - done);
}
