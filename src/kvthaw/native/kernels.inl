// The kernels, written once on GCC's vector types and compiled once per instruction set: the including file defines KV_NAME,
// KV_ISA, KV_WIDTH (floats per vector), KV_GROUP (keys per register block of `nearest`), and KV_NEON for its instructions, which each
// aarch64 machine has, so that the compiler does not tell the scalar file from NEON's. Nothing here may be an inline function
// of another header: the linker could keep this file's copy of it, with instructions that a lesser machine lacks. Compiled with
// -ffp-contract=off: where a product and a sum are rounded once, `fused` says so, and no compiler decides it for each loop again.

#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(KV_NEON)
#include <arm_neon.h>
#endif

#include "kernels.h"

namespace kvthaw {
namespace KV_NAME {
namespace {

constexpr int W = KV_WIDTH;
typedef float Vec __attribute__((vector_size(4 * W)));
typedef float Loose __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(4 * W)));
typedef uint32_t Bits __attribute__((vector_size(4 * W)));
typedef int8_t Bytes __attribute__((vector_size(W), aligned(1), may_alias));
typedef uint16_t Halves __attribute__((vector_size(2 * W), aligned(2), may_alias));
typedef float HalfVec __attribute__((vector_size(2 * W), aligned(4), may_alias));
typedef double Doubles __attribute__((vector_size(4 * W)));

inline float from_bits(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

inline float half_to_float(uint16_t h) {
    uint32_t bits = static_cast<uint32_t>(h & 0x7fff) << 13;
    const float scaled = from_bits(bits) * 0x1p112f;  // exponents 15 -> 127, subnormals included
    std::memcpy(&bits, &scaled, 4);
    if ((h & 0x7c00) == 0x7c00) bits |= 0x7f800000u;
    return from_bits(bits | static_cast<uint32_t>(h & 0x8000) << 16);
}

#if defined(KV_NEON)
// Four bytes, in the lower half of the vector.
inline int8x8_t load_bytes(const void* at) {
    uint32_t bits;
    std::memcpy(&bits, at, 4);
    return vreinterpret_s8_u32(vdup_n_u32(bits));
}

inline Vec halves_to_floats(uint16x4_t bits) { return (Vec)vcvt_f32_f16(vreinterpret_f16_u16(bits)); }
#endif

// What an e4m3 key's codes, read as load() and load_one() do, are multiplied by.
inline float scale_of(const void* row) {
    float scale;
    std::memcpy(&scale, static_cast<const char*>(row) - kScales, 4);
    return scale * 256.0f;
}

// What an i8 row's codes are multiplied by.
inline float step_of(const void* row, int dim) {
    float step;
    std::memcpy(&step, static_cast<const char*>(row) + coded_bytes(dim) - 4, 4);
    return step;
}

// f8: 1/256 of the code's number, since float16 has its bits with another bias of the exponent.
template <Dtype T>
inline float load_one(const void* row, int i) {
    if constexpr (T == Dtype::f32) return static_cast<const float*>(row)[i];
    if constexpr (T == Dtype::f64) return static_cast<float>(static_cast<const double*>(row)[i]);
    if constexpr (T == Dtype::i8) return static_cast<const int8_t*>(row)[i];
    if constexpr (T == Dtype::f8) {
        const uint32_t code = static_cast<const uint8_t*>(row)[i];
        return half_to_float(static_cast<uint16_t>((code & 0x80) << 8 | (code & 0x7f) << 7));
    }
    const uint16_t h = static_cast<const uint16_t*>(row)[i];
    return T == Dtype::bf16 ? from_bits(static_cast<uint32_t>(h) << 16) : half_to_float(h);
}

template <Dtype T>
inline Vec load(const void* row, int i) {
    if constexpr (T == Dtype::f32) {
        return *reinterpret_cast<const Loose*>(static_cast<const float*>(row) + i);
    } else if constexpr (T == Dtype::f64) {
        Vec x;
        for (int j = 0; j < W; ++j) x[j] = load_one<T>(row, i + j);
        return x;
    } else if constexpr (T == Dtype::i8) {
        const int8_t* at = static_cast<const int8_t*>(row) + i;
#if defined(__AVX512F__)
        return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))));
#elif defined(__AVX2__)
        return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at))));
#elif defined(KV_NEON)
        return (Vec)vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(load_bytes(at)))));
#else
        return __builtin_convertvector(*reinterpret_cast<const Bytes*>(at), Vec);
#endif
    } else if constexpr (T == Dtype::f8) {
#if defined(__AVX512F__)
        const __m256i code = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(static_cast<const char*>(row) + i)));
        const __m256i sign = _mm256_and_si256(_mm256_slli_epi16(code, 8), _mm256_set1_epi16(static_cast<short>(0x8000)));
        const __m256i size = _mm256_and_si256(_mm256_slli_epi16(code, 7), _mm256_set1_epi16(0x3f80));
        return (Vec)_mm512_cvtph_ps(_mm256_or_si256(sign, size));
#elif defined(__F16C__)
        const __m128i code = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(static_cast<const char*>(row) + i)));
        const __m128i sign = _mm_and_si128(_mm_slli_epi16(code, 8), _mm_set1_epi16(static_cast<short>(0x8000)));
        const __m128i size = _mm_and_si128(_mm_slli_epi16(code, 7), _mm_set1_epi16(0x3f80));
        return (Vec)_mm256_cvtph_ps(_mm_or_si128(sign, size));
#elif defined(KV_NEON)
        const int8x8_t bytes = load_bytes(static_cast<const char*>(row) + i);
        const uint16x4_t code = vget_low_u16(vmovl_u8(vreinterpret_u8_s8(bytes)));
        const uint16x4_t sign = vand_u16(vshl_n_u16(code, 8), vdup_n_u16(0x8000)), size = vand_u16(vshl_n_u16(code, 7), vdup_n_u16(0x3f80));
        return halves_to_floats(vorr_u16(sign, size));
#else
        Vec x;
        for (int j = 0; j < W; ++j) x[j] = load_one<T>(row, i + j);
        return x;
#endif
    } else {
        const uint16_t* at = static_cast<const uint16_t*>(row) + i;
        if constexpr (T == Dtype::bf16) {
#if defined(__AVX512F__)
            return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at))), 16);
#elif defined(__AVX2__)
            return (Vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))), 16);
#else
            return (Vec)(__builtin_convertvector(*reinterpret_cast<const Halves*>(at), Bits) << 16);
#endif
        } else {
#if defined(__AVX512F__)
            return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
#elif defined(__F16C__)
            return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
#elif defined(KV_NEON)
            return halves_to_floats(vld1_u16(at));
#else
            Vec x;
            for (int j = 0; j < W; ++j) x[j] = half_to_float(at[j]);
            return x;
#endif
        }
    }
}

inline Vec load(const float* at) { return *reinterpret_cast<const Loose*>(at); }

inline Vec every(float x) { return x - Vec{}; }

// a * b + c, rounded once where the machine can.
inline Vec fused(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
    return _mm256_fmadd_ps(a, b, c);
#elif defined(KV_NEON)
    return (Vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

// Sums of one vector and of four at once, added in the same order: equal rows have equal scores wherever they stand.
#if defined(__AVX2__)
inline __m256 fold(Vec x) {
#if defined(__AVX512F__)
    return _mm256_add_ps(_mm512_castps512_ps256(x), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1)));
#else
    return x;
#endif
}

inline void sum4(const Vec* x, float* out) {
    const __m256 ab = _mm256_hadd_ps(fold(x[0]), fold(x[1])), cd = _mm256_hadd_ps(fold(x[2]), fold(x[3]));
    const __m256 all = _mm256_hadd_ps(ab, cd);
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
}

inline float sum(Vec x) {
    __m256 y = fold(x);
    y = _mm256_hadd_ps(y, y);
    y = _mm256_hadd_ps(y, y);
    return _mm_cvtss_f32(_mm_add_ss(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1)));
}
#else
inline float sum(Vec x) { return (x[0] + x[1]) + (x[2] + x[3]); }

inline void sum4(const Vec* x, float* out) {
#if defined(KV_NEON)
    const float32x4_t ab = vpaddq_f32((float32x4_t)x[0], (float32x4_t)x[1]), cd = vpaddq_f32((float32x4_t)x[2], (float32x4_t)x[3]);
    vst1q_f32(out, vpaddq_f32(ab, cd));
#else
    for (int r = 0; r < 4; ++r) out[r] = sum(x[r]);
#endif
}
#endif

template <Dtype T>
void widen_as(const void* row, int dim, float* out) {
    int i = 0;
    for (; i + W <= dim; i += W) *reinterpret_cast<Loose*>(out + i) = load<T>(row, i);
    for (; i < dim; ++i) out[i] = load_one<T>(row, i);
    if constexpr (T == Dtype::f8) {
        const float scale = scale_of(row);
        for (i = 0; i < dim; ++i) out[i] *= scale;
    }
}

void widen(const void* row, int dim, Dtype dtype, float* out) {
    if (dtype == Dtype::f32) return widen_as<Dtype::f32>(row, dim, out);
    if (dtype == Dtype::bf16) return widen_as<Dtype::bf16>(row, dim, out);
    if (dtype == Dtype::f64) return widen_as<Dtype::f64>(row, dim, out);
    if (dtype == Dtype::f8) return widen_as<Dtype::f8>(row, dim, out);
    return widen_as<Dtype::f16>(row, dim, out);
}

template <Dtype T>
void add_as(const void* row, int dim, double weight, double* sum) {
    typedef double LooseDoubles __attribute__((vector_size(4 * W), aligned(8), may_alias));
    int i = 0;
    if constexpr (T == Dtype::f8) weight *= scale_of(row);
    if constexpr (T == Dtype::i8) weight *= step_of(row, dim);
    for (; i + W <= dim; i += W) {
        const Vec x = load<T>(row, i);
        HalfVec half[2];
        std::memcpy(half, &x, sizeof(x));
        for (int h = 0; h < 2; ++h)
            *reinterpret_cast<LooseDoubles*>(sum + i + h * W / 2) += weight * __builtin_convertvector(half[h], Doubles);
    }
    for (; i < dim; ++i) sum[i] += weight * load_one<T>(row, i);
}

void add(const void* row, int dim, Dtype dtype, double weight, double* sum) {
    if (dtype == Dtype::f32) return add_as<Dtype::f32>(row, dim, weight, sum);
    if (dtype == Dtype::bf16) return add_as<Dtype::bf16>(row, dim, weight, sum);
    if (dtype == Dtype::i8) return add_as<Dtype::i8>(row, dim, weight, sum);
    if (dtype == Dtype::f64) return add_as<Dtype::f64>(row, dim, weight, sum);
    if (dtype == Dtype::f8) return add_as<Dtype::f8>(row, dim, weight, sum);
    return add_as<Dtype::f16>(row, dim, weight, sum);
}

void measure(const float* key, int dim, const float* directions, int count, int stride, double* norm2, float* raw) {
    Doubles squares = {};
    double total = 0;
    int i = 0;
    for (; i + W / 2 <= dim; i += W / 2) {
        const Doubles x = __builtin_convertvector(*reinterpret_cast<const HalfVec*>(key + i), Doubles);
        squares += x * x;
    }
    for (; i < dim; ++i) total += static_cast<double>(key[i]) * key[i];
    for (int j = 0; j < W / 2; ++j) total += squares[j];
    *norm2 = total;
    for (int d = 0; d < count; ++d) {
        const float* direction = directions + static_cast<size_t>(d) * stride;
        Vec dot = {};
        for (i = 0; i + W <= dim; i += W) dot = fused(load(key + i), load(direction + i), dot);
        float value = sum(dot);
        for (; i < dim; ++i) value += key[i] * direction[i];
        raw[d] = value;
    }
}

template <Dtype T, int R>
inline void dot_rows(const float* query, const void* const* rows, int dim, float* out) {
    Vec dot[R] = {};
    int i = 0;
    for (; i + W <= dim; i += W) {
        const Vec q = load(query + i);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) dot[r] = fused(load<T>(rows[r], i), q, dot[r]);
    }
    if constexpr (R == 4)
        sum4(dot, out);
    else
        for (int r = 0; r < R; ++r) out[r] = sum(dot[r]);
    for (; i < dim; ++i)
        for (int r = 0; r < R; ++r) out[r] += load_one<T>(rows[r], i) * query[i];
    if constexpr (T == Dtype::f8)
        for (int r = 0; r < R; ++r) out[r] *= scale_of(rows[r]);
}

// Rows lie anywhere, so the hardware cannot foresee them: ask for those kAhead further on, in the second cache, which can wait for
// more lines at once than the first.
constexpr size_t kAhead = 64;

inline void ask(const void* row, size_t bytes) {
    for (size_t b = 0; b < bytes; b += 64) __builtin_prefetch(static_cast<const char*>(row) + b, 0, 2);
}

template <Dtype T>
void dots_as(const float* query, const void* const* rows, size_t count, int dim, float* out) {
    const size_t bytes = static_cast<size_t>(dim) * size_of(T);
    for (size_t r = 0; r < count && r < kAhead; ++r) ask(rows[r], bytes);
    size_t r = 0;
    for (; r + 4 <= count; r += 4) {
        for (size_t a = r + kAhead; a < r + kAhead + 4 && a < count; ++a) ask(rows[a], bytes);
        dot_rows<T, 4>(query, rows + r, dim, out + r);
    }
    for (; r < count; ++r) dot_rows<T, 1>(query, rows + r, dim, out + r);
}

#include "codes.inl"

void dots(const float* query, const void* const* rows, size_t count, int dim, Dtype dtype, float* out) {
    if (dtype == Dtype::f32) return dots_as<Dtype::f32>(query, rows, count, dim, out);
    if (dtype == Dtype::bf16) return dots_as<Dtype::bf16>(query, rows, count, dim, out);
    if (dtype == Dtype::f64) return dots_as<Dtype::f64>(query, rows, count, dim, out);
    if (dtype == Dtype::f8) return dots_as<Dtype::f8>(query, rows, count, dim, out);
    return dots_as<Dtype::f16>(query, rows, count, dim, out);
}

// K keys against rows, four at a time; the sums are dot_rows'.
template <int K>
inline void multiply_rows(const float* const* keys, const float* panel, int rows, int dim, float* out) {
    for (int row = 0; row < rows; row += 4) {
        const float* from = panel + static_cast<size_t>(row) * dim;
        Vec dot[K][4] = {};
        int i = 0;
        for (; i + W <= dim; i += W) {
            Vec own[K];
#pragma GCC unroll 8
            for (int k = 0; k < K; ++k) own[k] = load(keys[k] + i);
#pragma GCC unroll 4
            for (int r = 0; r < 4; ++r) {
                const Vec x = load(from + r * dim + i);
#pragma GCC unroll 8
                for (int k = 0; k < K; ++k) dot[k][r] = fused(x, own[k], dot[k][r]);
            }
        }
#pragma GCC unroll 8
        for (int k = 0; k < K; ++k) sum4(dot[k], out + static_cast<size_t>(k) * rows + row);
        for (; i < dim; ++i)
            for (int k = 0; k < K; ++k)
                for (int r = 0; r < 4; ++r) out[static_cast<size_t>(k) * rows + row + r] += from[r * dim + i] * keys[k][i];
    }
}

void products(const float* const* keys, int count, const float* panel, int rows, int dim, float* out) {
    constexpr int K = W == 8 ? 3 : 4;  // as many as the sums leave registers for
    int k = 0;
    for (; k + K <= count; k += K) multiply_rows<K>(keys + k, panel, rows, dim, out + static_cast<size_t>(k) * rows);
    for (; k < count; ++k) multiply_rows<1>(keys + k, panel, rows, dim, out + static_cast<size_t>(k) * rows);
}

// exp(x) for x <= 0, to 2e-7 of itself, 0 below -87: 2^n times a polynomial of what is left, at most half of log 2 from 0.
inline Vec exp_below(Vec x) {
    const Vec at = x < -87.0f ? Vec{} - 87.0f : x;
    const Vec shifted = at * 1.44269504f + kRound, n = shifted - kRound;
    const Vec f = (at - n * 0.693359375f) - n * -2.12194440e-4f;
    constexpr float terms[] = {8.3751328e-3f, 4.1666353e-2f, 1.6666415e-1f, 0.5f, 1.0f, 1.0f};
    Vec p = every(1.3941116e-3f);
    for (const float term : terms) p = fused(p, f, every(term));
    const Vec two = (Vec)((((Ints)shifted << 23) + (127 << 23)));
    return x < -87.0f ? Vec{} : p * two;
}

float log_sum_exp(const float* x, size_t count, float scale) {
    Vec most = Vec{} - __builtin_inff(), total = {};
    size_t i = 0;
    for (; i + W <= count; i += W) {
        const Vec own = load(x + i);
        most = own > most ? own : most;
    }
    float top = -__builtin_inff(), sum = 0;
    for (int j = 0; j < W; ++j) top = most[j] > top ? most[j] : top;
    for (size_t j = i; j < count; ++j) top = x[j] > top ? x[j] : top;
    for (size_t j = 0; j + W <= count; j += W) total += exp_below((load(x + j) - top) * scale);
    for (int j = 0; j < W; ++j) sum += total[j];
    for (; i < count; ++i) sum += __builtin_expf((x[i] - top) * scale);
    return top * scale + __builtin_logf(sum);
}

inline void keep_larger(Vec& best, Ints& which, Vec value, int at) {
#if defined(__AVX512F__)
    const __mmask16 larger = _mm512_cmp_ps_mask(value, best, _CMP_GT_OQ);
    best = _mm512_mask_mov_ps(best, larger, value);
    which = (Ints)_mm512_mask_set1_epi32((__m512i)which, larger, at);
#else
    const Ints larger = value > best;
    best = larger ? value : best;
    which = larger ? Ints{} + at : which;
#endif
}

// One register block: KV_GROUP keys against a panel of two vectors of parents, all of depth.
void nearest(const float* keys, int count, const float* panels, int parents, int depth, int32_t* which) {
    constexpr int M = KV_GROUP;
    Vec best[kNearestKeys];
    Ints at[kNearestKeys];
    for (int k = 0; k < count; ++k) {
        best[k] = Vec{} - __builtin_inff();
        at[k] = Ints{};
    }
    for (int p = 0; p * 2 * W < parents; ++p) {
        const float* panel = panels + static_cast<size_t>(p) * 2 * W * depth;
        for (int k = 0; k < count; k += M) {
            const float* key = keys + static_cast<size_t>(k) * depth;
            Vec low[M] = {}, high[M] = {};
            for (int d = 0; d < depth; ++d) {
                const Vec a = load(panel + d * 2 * W), b = load(panel + d * 2 * W + W);
#pragma GCC unroll 16
                for (int m = 0; m < M; ++m) {
                    const Vec x = every(key[m * depth + d]);
                    low[m] = fused(x, a, low[m]);
                    high[m] = fused(x, b, high[m]);
                }
            }
#pragma GCC unroll 16
            for (int m = 0; m < M; ++m) {
                keep_larger(best[k + m], at[k + m], low[m], 2 * p);
                keep_larger(best[k + m], at[k + m], high[m], 2 * p + 1);
            }
        }
    }
    for (int k = 0; k < count; ++k) {
        float top = -__builtin_inff();
        int32_t first = 0;
        for (int lane = 0; lane < W; ++lane) {
            const int32_t parent = at[k][lane] * W + lane;
            if (best[k][lane] > top || (best[k][lane] == top && parent < first)) {
                top = best[k][lane];
                first = parent;
            }
        }
        which[k] = first < parents ? first : parents - 1;
    }
}

}  // namespace

const Kernels* table() {
    static const Kernels kernels = {Isa::KV_ISA, 2 * W, KV_GROUP, widen, add, encode, measure, dots, dots_together, products, log_sum_exp, nearest};
    return &kernels;
}

}  // namespace KV_NAME
}  // namespace kvthaw
