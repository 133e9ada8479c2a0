// Rows of 8 bits with their step: a part of kernels.inl. Whole numbers have one sum in any order, so that all machines agree to the bit.

constexpr float kRound = 0x1.8p23f;  // a number added to it stands in its lowest bits, rounded

// The largest |x|.
inline float largest_of(const float* from, int dim) {
    Vec most = {};
    int i = 0;
    for (; i + W <= dim; i += W) {
        const Vec x = load(from + i), size = x < 0 ? -x : x;
        most = size > most ? size : most;
    }
    float largest = 0;
    for (int j = 0; j < W; ++j) largest = most[j] > largest ? most[j] : largest;
    for (; i < dim; ++i) largest = __builtin_fabsf(from[i]) > largest ? __builtin_fabsf(from[i]) : largest;
    return largest;
}

// out[dim]: the whole numbers nearest to from / step, at most `most` in size; returns the step.
template <class Code>
inline float round_to(const float* from, int dim, int most, Code* out) {
    typedef Code Codes __attribute__((vector_size(sizeof(Code) * W), aligned(1), may_alias));
    const float step = largest_of(from, dim) / static_cast<float>(most), safe = step > 0 ? step : 1.0f;
    int i = 0;
    for (; i + W <= dim; i += W) {
        const Ints whole = (Ints)(load(from + i) / safe + kRound);
        *reinterpret_cast<Codes*>(out + i) = __builtin_convertvector(whole, Codes);
    }
    for (; i < dim; ++i) {
        const float at = from[i] / safe + kRound;
        std::memcpy(out + i, &at, sizeof(Code));
    }
    return step;
}

void encode(const float* from, int dim, void* out) {
    auto* codes = static_cast<int8_t*>(out);
    const float step = round_to(from, dim, 127, codes);
    for (size_t i = dim; i < coded_bytes(dim) - 4; ++i) codes[i] = 0;
    std::memcpy(codes + coded_bytes(dim) - 4, &step, 4);
}

#if defined(__AVX512F__)
typedef __m512i Sums;
constexpr int kCodes = 32;  // at a time
inline Sums multiply(Sums sum, const int16_t* query, const int8_t* row) {
    const __m512i wide = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(row)));
    return _mm512_dpwssd_epi32(sum, wide, _mm512_loadu_si512(query));
}
inline __m256i halve(Sums x) { return _mm256_add_epi32(_mm512_castsi512_si256(x), _mm512_extracti64x4_epi64(x, 1)); }
#elif defined(__AVX2__)
typedef __m256i Sums;
constexpr int kCodes = 16;
inline Sums multiply(Sums sum, const int16_t* query, const int8_t* row) {
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(row)));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(wide, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(query))));
}
inline __m256i halve(Sums x) { return x; }
#elif defined(KV_NEON)
typedef int32x4_t Sums;
constexpr int kCodes = 8;
inline Sums multiply(Sums sum, const int16_t* query, const int8_t* row) {
    const int16x8_t wide = vmovl_s8(vld1_s8(row)), own = vld1q_s16(query);
    return vmlal_s16(vmlal_s16(sum, vget_low_s16(wide), vget_low_s16(own)), vget_high_s16(wide), vget_high_s16(own));
}
inline void totals(const Sums* x, int32_t* out) {
    vst1q_s32(out, vpaddq_s32(vpaddq_s32(x[0], x[1]), vpaddq_s32(x[2], x[3])));
}
#else
typedef int32_t Sums;
constexpr int kCodes = 1;
inline Sums multiply(Sums sum, const int16_t* query, const int8_t* row) { return sum + static_cast<int32_t>(*query) * *row; }
inline void totals(const Sums* x, int32_t* out) { std::memcpy(out, x, 16); }
#endif

#if defined(__AVX2__)
inline void totals(const Sums* x, int32_t* out) {
    const __m256i ab = _mm256_hadd_epi32(halve(x[0]), halve(x[1])), cd = _mm256_hadd_epi32(halve(x[2]), halve(x[3]));
    const __m256i all = _mm256_hadd_epi32(ab, cd);
    const __m128i sums = _mm_add_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), sums);
}
#endif

// Of Q queries with the rows of a block; out: where each one's products go, moved on behind them.
template <int Q>
inline void dot_block(const RowBlock& block, const int16_t* const* queries, const float* scales, int dim, float** const* out) {
    constexpr int R = 4 / Q;  // rows at a time
    const size_t bytes = coded_bytes(dim);
    for (int begin = 0; begin < block.count; begin += R) {
        const int left = block.count - begin;
        const int8_t* rows[R];
        for (int r = 0; r < R; ++r) rows[r] = reinterpret_cast<const int8_t*>(block.rows) + (begin + (r < left ? r : 0)) * bytes;
        Sums sums[4] = {};
        int32_t dots[4];
        int i = 0;
        for (; i + kCodes <= dim; i += kCodes)
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
                for (int q = 0; q < Q; ++q) sums[r * Q + q] = multiply(sums[r * Q + q], queries[q] + i, rows[r] + i);
        totals(sums, dots);
        for (; i < dim; ++i)
            for (int r = 0; r < R; ++r)
                for (int q = 0; q < Q; ++q) dots[r * Q + q] += static_cast<int32_t>(queries[q][i]) * rows[r][i];
        for (int r = 0; r < R && r < left; ++r)
            for (int q = 0; q < Q; ++q) *(*out[q])++ = static_cast<float>(dots[r * Q + q]) * (scales[q] * step_of(rows[r], dim));
    }
}

void dots_together(const float* const* queries, int count, const RowBlock* blocks, size_t many, int dim, float* const* out) {
    constexpr int64_t kMost = 0x7fffffff;  // no sum is larger
    const int64_t fits = kMost / (static_cast<int64_t>(127) * dim);
    auto* whole = static_cast<int16_t*>(__builtin_alloca(2 * static_cast<size_t>(dim) * count));
    float scales[kTogether];
    float* next[kTogether];
    for (int q = 0; q < count; ++q) {
        scales[q] = round_to(queries[q], dim, fits < 32767 ? static_cast<int>(fits) : 32767, whole + static_cast<size_t>(q) * dim);
        next[q] = out[q];
    }
    const size_t bytes = coded_bytes(dim);
    size_t asked = 0;
    for (size_t b = 0, ahead = 0; b < many; ahead -= blocks[b++].count) {  // ahead: rows asked for from this block on
        for (; asked < many && ahead < kAhead; ahead += blocks[asked++].count) ask(blocks[asked].rows, blocks[asked].count * bytes);
        const int16_t* own[kTogether];
        float own_scales[kTogether];
        float** to[kTogether];
        int wanted = 0;
        for (int q = 0; q < count; ++q) {
            if (!(blocks[b].queries >> q & 1)) continue;
            own[wanted] = whole + static_cast<size_t>(q) * dim;
            own_scales[wanted] = scales[q];
            to[wanted++] = next + q;
        }
        if (wanted == 1) dot_block<1>(blocks[b], own, own_scales, dim, to);
        if (wanted == 2) dot_block<2>(blocks[b], own, own_scales, dim, to);
        if (wanted == 3) dot_block<3>(blocks[b], own, own_scales, dim, to);
        if (wanted == 4) dot_block<4>(blocks[b], own, own_scales, dim, to);
    }
}
