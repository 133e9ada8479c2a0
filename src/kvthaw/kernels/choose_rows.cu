// choose_rows.py says what this computes. A cluster of CLUSTER blocks of THREADS threads serves one KV head; P query heads a KV head.

constexpr int WARPS = THREADS / 32, BINS = 128, CHUNK = 2048, BLOCK = 512, SUBS = 16, TILE = 16;
constexpr int LEVELS = 256;                       // of the histogram by which the best are found
constexpr int ROOM = 512;                         // of the candidates that are compared with each other; k is less
constexpr int FOURS = (P + 3) / 4, PAIRS = (P + 1) / 2;
constexpr int HEADS = P > 4 ? 8 : P > 2 ? 4 : P;  // a power of two
constexpr u32 ALL = 0xffffffffu;
constexpr float LEAST = -3.0e38f;

#ifdef TIMES  // for a benchmark: cycles since a block began, behind the counts
#define PASSED(i) \
  if (threadIdx.x == 0) found[gridDim.y * gridDim.z + (pair * CLUSTER + rank) * 16 + i] = (int)(clock64() - begun)
#else
#define PASSED(i)
#endif

struct Cut {
  int bin, before, through;  // the level of the goal-th best, and how many are in better levels, in those and its own
};

struct alignas(16) Shared {
  u64 last[ROOM];  // first block only: the best of all
  float2 parts[WARPS][HEADS], masses[CLUSTER][HEADS];
  int before[WARPS][4];
  int levels[LEVELS], all_levels[LEVELS];  // of a block's candidates, then of all; in the first block: of all
  int chosen[ROOM];
  int taken;
};

DEVICE float2 joined(float2 a, float2 b) {  // maxima and sums of exp(x - maximum)
  float top = fmaxf(a.x, b.x);
  return {top, a.y * __expf(a.x - top) + b.y * __expf(b.x - top)};
}

template <int FIRST>
DEVICE float2 over_lanes(float2 x) {  // of lanes that are equal modulo FIRST
#pragma unroll
  for (int step = FIRST; step < 32; step *= 2) x = joined(x, {__shfl_xor_sync(ALL, x.x, step), __shfl_xor_sync(ALL, x.y, step)});
  return x;
}

// Bit i: byte i of 16, each less than 128, is at least limit, and i < left.
DEVICE u32 marks(uint4 x, int limit, int left) {
  u32 add = (u32)(128 - limit) * 0x01010101u, words[4] = {x.x, x.y, x.z, x.w}, found = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) found |= ((((words[i] + add) >> 7) & 0x01010101u) * 0x10204080u >> 28) << (4 * i);
  return left >= 16 ? found : left <= 0 ? 0 : found & ((1u << left) - 1);
}

// The levels (bytes) of four nibbles, v or ~v for negative ones.
DEVICE u32 decoded(u32 x, u32 low, u32 high) {
  return permuted(low, high, x & 0x7777) ^ permuted(x << 4, x, 0xd9c8);
}

DEVICE u64 composite(float weight, int place) {  // larger: heavier, or as heavy and earlier
  u32 bits = __float_as_int(weight + 0.0f);
  return (u64)(bits ^ ((int)bits < 0 ? ALL : 0x80000000u)) << 32 | ~(u32)place;
}

DEVICE int level_of(float weight, float best) {  // 32 an octave of the distance to the best, from 1/16 to 16
  int level = (__float_as_int(fmaxf(best - weight, 0.0f)) >> 18) - (0x3d800000 >> 18) + 1;
  return level < 0 ? 0 : level > LEVELS - 1 ? LEVELS - 1 : level;
}

DEVICE Cut find(const int* levels, int goal) {  // 1 <= goal <= all; each warp for itself
  const int lane = threadIdx.x & 31;
  int own[LEVELS / 32], sum = 0;
#pragma unroll
  for (int i = 0; i < LEVELS / 32; i++) sum += own[i] = levels[lane * (LEVELS / 32) + i];
  int through = sum;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    int other = __shfl_up_sync(ALL, through, step);
    if (lane >= step) through += other;
  }
  const int who = __ffs(__ballot_sync(ALL, through >= goal)) - 1;
  int before = through - sum, bin = lane * (LEVELS / 32), one = own[0];
#pragma unroll
  for (int i = 1; i < LEVELS / 32; i++)
    if (before + one < goal) before += one, one = own[i], bin++;
  return {__shfl_sync(ALL, bin, who), __shfl_sync(ALL, before, who), __shfl_sync(ALL, before + one, who)};
}

// Where the goal-th best of the cluster lies, by the levels of each block's candidates. Called by all threads.
DEVICE Cut find_among_all(Shared& sm, int goal) {
  __syncthreads();
  for (int i = threadIdx.x; i < LEVELS; i += THREADS)
    if (sm.levels[i]) add(&sm.all_levels[i], 0, sm.levels[i]);
  cluster_arrive();
  cluster_wait();
  for (int i = threadIdx.x; i < LEVELS; i += THREADS) sm.levels[i] = get(&sm.all_levels[i], 0);
  __syncthreads();
  return find(sm.levels, goal);
}

struct Least {
  u64 composite;
  int count;
};

// Where a level holds too many: what at least goal and at most ROOM composites of the cluster reach, which all differ.
DEVICE_COLD Least narrow(Shared& sm, const float* kept, const int* place, int own, int goal) {
  u64 prefix = 0;
  int above = 0;
  for (int shift = 56;; shift -= 8) {
    cluster_arrive();
    cluster_wait();  // all blocks have read the levels before
    for (int i = threadIdx.x; i < LEVELS; i += THREADS) sm.levels[i] = sm.all_levels[i] = 0;
    cluster_arrive();
    cluster_wait();
#pragma unroll 1
    for (int m = threadIdx.x; m < own; m += THREADS) {
      const u64 one = composite(kept[m * P], place[m]);
      if (shift == 56 || one >> (shift + 8) == prefix) atomicAdd(&sm.levels[255 - (int)(one >> shift & 255)], 1);
    }
    const Cut cut = find_among_all(sm, goal - above);
    prefix = prefix << 8 | (u64)(255 - cut.bin);
    if (above + cut.through <= ROOM) return {prefix << shift, above + cut.through};
    above += cut.before;
  }
}

// The candidates that the histogram leaves, their positions dealt to the blocks in tiles. Ties to the lowest positions.
DEVICE void collect(Shared& sm, int* place, const u8* scores, const int* counts, const int* totals, int length, int want, int chunks,
                    int rank) {
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const int used = (length + CHUNK - 1) / CHUNK, each = (used + CLUSTER - 1) / CLUSTER;
  const int first_chunk = min(rank * each, used), blocks = (min(first_chunk + each, used) - first_chunk) * (CHUNK / BLOCK);
  const int run = (each * (CHUNK / BLOCK) + WARPS - 1) / WARPS, begin = min(warp * run, blocks), end = min(begin + run, blocks);
  const int key = first_chunk * CHUNK + lane * 16;
  const uint4 nothing = {0, 0, 0, 0};
  const uint4 head = begin < end ? *(const uint4*)(scores + key + begin * BLOCK) : nothing;
  const int4 four = ((const int4*)totals)[lane];
  const int threshold = __reduce_add_sync(ALL, (four.x >= want) + (four.y >= want) + (four.z >= want) + (four.w >= want)) - 1;
  const bool higher = threshold + 1 < BINS;
  int at_least = 0, over = 0, above = 0, ties = 0;
#pragma unroll 1  // as all loops of unknown length: most of this code runs once, and must be fetched
  for (int c = tid; c < first_chunk; c += THREADS) {
    at_least += counts[threshold * chunks + c];
    if (higher) over += counts[(threshold + 1) * chunks + c];
  }
  const int quota = want - (higher ? totals[threshold + 1] : 0);
#pragma unroll 1
  for (int b = begin; b < end; b++) {
    const uint4 x = b == begin ? head : *(const uint4*)(scores + key + b * BLOCK);
    const int left = length - key - b * BLOCK, more = __popc(marks(x, threshold + 1, left));
    above += more, ties += __popc(marks(x, threshold, left)) - more;
  }
  above = __reduce_add_sync(ALL, above), ties = __reduce_add_sync(ALL, ties);
  at_least = __reduce_add_sync(ALL, at_least), over = __reduce_add_sync(ALL, over);
  if (lane == 0) *(int4*)sm.before[warp] = {above, ties, over, at_least - over};
  __syncthreads();
  const int4 part = lane < WARPS ? *(const int4*)sm.before[lane] : int4{0, 0, 0, 0};
  above = __reduce_add_sync(ALL, part.z + (lane < warp ? part.x : 0));
  ties = __reduce_add_sync(ALL, part.w + (lane < warp ? part.y : 0));
  cluster_wait();  // all blocks run
#pragma unroll 1
  for (int b = begin; b < end; b++) {
    const uint4 x = b == begin ? head : *(const uint4*)(scores + key + b * BLOCK);
    const int left = length - key - b * BLOCK;
    const u32 best = marks(x, threshold + 1, left), same = marks(x, threshold, left) & ~best;
    const int number = __popc(best) | __popc(same) << 16;
    int all = number;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      int other = __shfl_up_sync(ALL, all, step);
      if (lane >= step) all += other;
    }
    const int mine_above = above + ((all - number) & 0xffff), mine_ties = ties + ((all - number) >> 16);
#pragma unroll 1
    for (u32 rest = best | same; rest; rest &= rest - 1) {
      const int i = __ffs(rest) - 1, tie = mine_ties + __popc(same & ((1u << i) - 1));
      const u32 slot = mine_above + __popc(best & ((1u << i) - 1)) + min(tie, quota);
      if ((same >> i & 1) && tie >= quota) continue;
      put(place + (slot / (TILE * CLUSTER) * TILE | slot % TILE), slot / TILE % CLUSTER, key + b * BLOCK + i);
    }
    all = __shfl_sync(ALL, all, 31);
    above += all & 0xffff, ties += all >> 16;
  }
}

KERNEL(choose_rows)(const u8* scores, const int* counts, const int* totals, const int* lengths, const int* wanted, const u32* whole,
                    const float* factors, const u32* codes, const u16* weights, int* rows, int* found, int heads, int capacity,
                    int chunks, int k, int first, int share, float scale, u32 low, u32 high) {
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, rank = blockIdx.x, t = lane & 3;
  const u64 pair = (u64)blockIdx.z * heads + blockIdx.y;
  const int length = lengths[blockIdx.z], want = wanted[blockIdx.z];
#ifdef TIMES
  const long long begun = clock64();
#endif
  Shared& sm = *(Shared*)shared_memory();
  static_assert(sizeof(Shared) <= FIXED, "the launcher counts too few bytes of shared memory");
  float* kept = (float*)(shared_memory() + FIXED);  // [share, P]
  int* place = (int*)(kept + share * P);
  cluster_arrive();
  for (int i = tid; i < LEVELS; i += THREADS) sm.levels[i] = sm.all_levels[i] = 0;
  if (tid == 0) sm.taken = 0;
  // A product takes four subspaces, 4 t + s of lane t, and has a column for each of them and each of two heads, which is zero in the
  // others: a lane gets the sums of its own subspace. They start at 2^23 + 2^22, so that they are bits of a float.
  constexpr float MAGIC = 12582912.0f;
  u32 columns[4][PAIRS][2];
  float factor[4][P], less[4][P];
#pragma unroll
  for (int s = 0; s < 4; s++) {
    uint2 query[2 * PAIRS];
#pragma unroll
    for (int p = 0; p < 2 * PAIRS; p++) {
      query[p] = uint2{0, 0};
      if (p >= P) continue;
      const u64 at = (pair * P + p) * SUBS + 4 * t + s;
      query[p] = ((const uint2*)whole)[at];
      factor[s][p] = factors[at] / 128;
      const int sum = __dp4a((int)query[p].x, 0x01010101, __dp4a((int)query[p].y, 0x01010101, 0));
      less[s][p] = factor[s][p] * MAGIC - factor[s][p] * (0.5f * (float)sum);  // a level is v + 1/2
    }
#pragma unroll
    for (int j = 0; j < PAIRS; j++) {
      const uint2 one = lane >> 2 & 1 ? query[2 * j + 1] : query[2 * j];
      columns[s][j][0] = lane >> 3 == t ? one.x : 0;
      columns[s][j][1] = lane >> 3 == t ? one.y : 0;
    }
  }
  PASSED(0);
  follow();
  PASSED(1);
  if (want <= 0) {
    cluster_wait();
    for (int i = tid; rank == 0 && i < k; i += THREADS) rows[pair * k + i] = -1;
    if (rank == 0 && tid == 0) found[pair] = 0;
    return;
  }
  collect(sm, place, scores + pair * chunks * CHUNK, counts + pair * BINS * chunks, totals + pair * BINS, length, want, chunks, rank);
  PASSED(2);
  cluster_arrive();
  const int rest = want % (TILE * CLUSTER) - TILE * rank;
  const int own = want / (TILE * CLUSTER) * TILE + (rest < 0 ? 0 : rest > TILE ? TILE : rest);
  float2 mass[FOURS];
#pragma unroll
  for (int f = 0; f < FOURS; f++) mass[f] = {LEAST, 0.0f};
  cluster_wait();
  PASSED(3);

  // Estimates: a warp takes tiles of 16 candidates, two at once; four lanes load the four words of each of two candidates of a tile.
  const float logit = P == 1 ? 1.0f : scale;
#pragma unroll 1
  for (int tile = warp; tile * TILE < own; tile += 2 * WARPS) {
    uint4 code[2][2];
    uint2 weigh[2][2];
#pragma unroll
    for (int u = 0; u < 2; u++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int m = (tile + u * WARPS) * TILE + h * 8 + (lane >> 2);
        code[u][h] = {0, 0, 0, 0}, weigh[u][h] = uint2{0, 0};
        if (m >= own) continue;
        const u64 at = (pair * capacity + place[m]) * SUBS + 4 * t;
        code[u][h] = *(const uint4*)(codes + at), weigh[u][h] = *(const uint2*)(weights + at);
      }
#pragma unroll
    for (int u = 0; u < 2; u++) {
      if ((tile + u * WARPS) * TILE >= own) break;
      float sums[2][4 * FOURS] = {};
#pragma unroll
      for (int s = 0; s < 4; s++) {
        u32 key[4];
        float by[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const u32 word = s == 0 ? code[u][h].x : s == 1 ? code[u][h].y : s == 2 ? code[u][h].z : code[u][h].w;
          const u32 two = s < 2 ? weigh[u][h].x : weigh[u][h].y;
          key[h] = decoded(word, low, high), key[h + 2] = decoded(word >> 16, low, high);
          by[h] = __int_as_float(s % 2 ? two & 0xffff0000u : two << 16);
        }
#pragma unroll
        for (int j = 0; j < PAIRS; j++) {
          int found[4];
          multiply(found, key, columns[s][j], 0x4b400000);
#pragma unroll
          for (int i = 0; i < 4; i++) {
            const int p = 2 * j + i % 2;
            if (p < P) sums[i / 2][p] += (__int_as_float(found[i]) * factor[s][p] - less[s][p]) * by[i / 2];
          }
        }
      }
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int m = (tile + u * WARPS) * TILE + h * 8 + (lane >> 2);
#pragma unroll
        for (int f = 0; f < FOURS; f++) {  // lane t gets the sum of head 4 f + t
          const float* x = sums[h] + 4 * f;
          const float a = (t & 1 ? x[1] : x[0]) + __shfl_xor_sync(ALL, t & 1 ? x[0] : x[1], 1);
          const float b = (t & 1 ? x[3] : x[2]) + __shfl_xor_sync(ALL, t & 1 ? x[2] : x[3], 1);
          const float score = (t & 2 ? b : a) + __shfl_xor_sync(ALL, t & 2 ? a : b, 2);
          if (m < own && 4 * f + t < P) {
            kept[m * P + 4 * f + t] = score;
            mass[f] = joined(mass[f], {score * logit, 1.0f});
          }
        }
      }
    }
  }

  PASSED(4);
  // The sum of each head's exponentials, over the cluster.
#pragma unroll
  for (int f = 0; f < FOURS; f++) {
    mass[f] = over_lanes<4>(mass[f]);
    if (lane < 4 && 4 * f + t < P) sm.parts[warp][4 * f + t] = mass[f];
  }
  __syncthreads();
  const int head = lane % HEADS;
  const float2 none = {LEAST, 0.0f};
  if (warp == 0) {
    float2 sum = none;
    for (int w = lane / HEADS; w < WARPS; w += 32 / HEADS) sum = joined(sum, head < P ? sm.parts[w][head] : none);
    sum = over_lanes<HEADS>(sum);
    for (int to = lane / HEADS; to < CLUSTER; to += 32 / HEADS) put(&sm.masses[rank][head], to, sum);
  }
  PASSED(5);
  cluster_arrive();
  cluster_wait();
  PASSED(6);
  float2 sum = none;
  for (int from = lane / HEADS; from < CLUSTER; from += 32 / HEADS) sum = joined(sum, sm.masses[from][head]);
  sum = over_lanes<HEADS>(sum);
  const float less_own = P == 1 ? 0.0f : sum.x + __logf(fmaxf(sum.y, 1.0e-30f));
  float best = head < P ? sum.x - less_own : LEAST, total[P];
#pragma unroll
  for (int step = 1; step < HEADS; step *= 2) best = fmaxf(best, __shfl_xor_sync(ALL, best, step));
#pragma unroll
  for (int p = 0; p < P; p++) total[p] = __shfl_sync(ALL, less_own, p);

  // The best of all go to the first block.
#pragma unroll 1
  for (int m = tid; m < own; m += THREADS) {
    float most = kept[m * P] * logit - total[0];
#pragma unroll
    for (int p = 1; p < P; p++) most = fmaxf(most, kept[m * P + p] * logit - total[p]);
    kept[m * P] = most;
    atomicAdd(&sm.levels[level_of(most, best)], 1);
  }
  PASSED(7);
  const int goal = min(k, want);
  Cut cut = find_among_all(sm, goal);
  PASSED(8);
  Least least = {0, cut.through};
  if (cut.through > ROOM) least = narrow(sm, kept, place, own, goal), cut.bin = LEVELS;
#pragma unroll 1
  for (int m0 = 0; m0 < own; m0 += THREADS) {
    const int m = m0 + tid;
    bool in = m < own && level_of(kept[m * P], best) <= cut.bin;
    const u64 one = in ? composite(kept[m * P], place[m]) : 0;
    in = in && one >= least.composite;
    const u32 who = __ballot_sync(ALL, in);
    if (!who) continue;
    int slot = lane == 0 ? add(&sm.taken, 0, __popc(who)) : 0;
    slot = __shfl_sync(ALL, slot, 0) + __popc(who & ((1u << lane) - 1));
    if (in) put(&sm.last[slot], 0, one);
  }
  PASSED(9);
  cluster_arrive();
  cluster_wait();
  PASSED(10);
  if (rank != 0) return;

  // Of those the k best.
#pragma unroll 1
  for (int i0 = 0; i0 < least.count; i0 += THREADS / 4) {  // four threads count those that are better than one
    const int i = i0 + tid / 4;
    const u64 one = i < least.count ? sm.last[i] : ~0ull;
    int better = 0;
#pragma unroll 4
    for (int j = t; j < least.count; j += 4) better += sm.last[j] > one;
    better += __shfl_xor_sync(ALL, better, 1);
    better += __shfl_xor_sync(ALL, better, 2);
    if (t == 0 && i < least.count && better < goal) sm.chosen[better] = ~(u32)one;
  }
  __syncthreads();
  PASSED(11);
#pragma unroll 1
  for (int i0 = 0; i0 < goal; i0 += THREADS / 4) {  // and those that stand before it
    const int i = i0 + tid / 4, one = i < goal ? sm.chosen[i] : 0;
    int before = 0;
#pragma unroll 4
    for (int j = t; j < goal; j += 4) before += sm.chosen[j] < one;
    before += __shfl_xor_sync(ALL, before, 1);
    before += __shfl_xor_sync(ALL, before, 2);
    if (t == 0 && i < goal) rows[pair * k + before] = one + first;
  }
#pragma unroll 1
  for (int i = goal + tid; i < k; i += THREADS) rows[pair * k + i] = -1;
  if (tid == 0) found[pair] = goal;
  PASSED(12);
}
