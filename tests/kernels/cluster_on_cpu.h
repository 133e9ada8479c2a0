// cluster.cuh for a CPU: a fibre for each thread of a cluster; its warps run in random order, each as far as it comes alone. What the
// hardware would not allow ends the process.
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
#define DEVICE static inline
#define DEVICE_COLD static
#define KERNEL(name) static void name
#define __expf(x) expf(x)
#define __logf(x) logf(x)
using std::min;

struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
struct int4 { int x, y, z, w; };
struct float2 { float x, y; };
struct Index { unsigned x, y, z; };

constexpr int ALL_THREADS = CLUSTER * THREADS;

struct Fibre {
  ucontext_t context;
  std::vector<char> stack;
  bool ended;
  int arrived, waited;  // at barriers of the cluster
  int turn;             // of the warp's exchanges
};
struct Barrier { int count, passed; };

static Index threadIdx, blockIdx;
static Fibre fibres[ALL_THREADS];
static ucontext_t scheduler;
static Barrier of_warp[ALL_THREADS / 32], of_block[CLUSTER], of_cluster;
static u64 exchanged[ALL_THREADS / 32][2][32];
static u8* shared[CLUSTER];
static int now, ended;
static bool moved;

static void must(bool holds, const char* what) {
  if (!holds) {
    fprintf(stderr, "%s\n", what);
    abort();
  }
}

static void pause() {
  const int own = now;
  swapcontext(&fibres[own].context, &scheduler);
  now = own, threadIdx.x = own % THREADS, blockIdx.x = own / THREADS;
}
static void pass(Barrier& barrier, int size) {
  const int before = barrier.passed;
  moved = true;
  if (++barrier.count == size) barrier.count = 0, barrier.passed++;
  while (barrier.passed == before) pause();
}
static void __syncthreads() { pass(of_block[now / THREADS], THREADS); }
static void cluster_arrive() {
  must(fibres[now].arrived == fibres[now].waited, "arrives twice");
  fibres[now].arrived++, moved = true;
  if (++of_cluster.count == ALL_THREADS) of_cluster.count = 0, of_cluster.passed++;
}
static void cluster_wait() {
  must(fibres[now].arrived == fibres[now].waited + 1, "waits before it arrives");
  const int want = ++fibres[now].waited;
  while (of_cluster.passed < want) pause();
}
static void follow() {}
static u8* shared_memory() { return shared[now / THREADS]; }
template <class T>
static T& there(T* own, int rank) {
  must(fibres[now].waited > 0, "asks a block that may not run yet");
  for (int i = 0; i < THREADS; i++) must(!fibres[rank * THREADS + i].ended, "asks a block that has ended");
  return *(T*)(shared[rank] + ((u8*)own - shared_memory()));
}
template <class T, class X>
static void put(T* own, int rank, X x) {
  there(own, rank) = x;
}
static int get(const int* own, int rank) { return there(own, rank); }
static int add(int* own, int rank, int x) {
  there(own, rank) += x;
  return there(own, rank) - x;
}

static const u64* exchange(u64 own) {  // what all threads of the warp gave
  const int warp = now / 32, turn = fibres[now].turn++ & 1;
  exchanged[warp][turn][now % 32] = own;
  pass(of_warp[warp], 32);
  return exchanged[warp][turn];
}
template <class T>
static T taken(T x, int from) {
  u64 raw = 0;
  memcpy(&raw, &x, sizeof x);
  raw = exchange(raw)[from];
  memcpy(&x, &raw, sizeof x);
  return x;
}
template <class T> static T __shfl_sync(u32, T x, int from) { return taken(x, from); }
template <class T> static T __shfl_xor_sync(u32, T x, int mask) { return taken(x, now % 32 ^ mask); }
template <class T> static T __shfl_up_sync(u32, T x, int by) { return taken(x, now % 32 < by ? now % 32 : now % 32 - by); }
static u32 __ballot_sync(u32, bool x) {
  const u64* all = exchange(x);
  u32 found = 0;
  for (int i = 0; i < 32; i++) found |= (u32)all[i] << i;
  return found;
}
static int __reduce_add_sync(u32, int x) {
  const u64* all = exchange((u32)x);
  u32 sum = 0;
  for (int i = 0; i < 32; i++) sum += (u32)all[i];
  return sum;
}
static int byte_of(u64 x, int i) { return (signed char)(x >> 8 * i); }
static void multiply(int (&sums)[4], const u32 (&a)[4], const u32 (&b)[2], int start) {  // bytes 4 t .. 4 t + 3 of a row or column: thread t of four
  u64 rows[2][32], columns[32];
  for (int h = 0; h < 2; h++) memcpy(rows[h], exchange((u64)a[h + 2] << 32 | a[h]), sizeof rows[h]);
  memcpy(columns, exchange((u64)b[1] << 32 | b[0]), sizeof columns);
  const int lane = now % 32;
  for (int& sum : sums) sum = start;
  for (int i = 0; i < 4; i++)
    for (int t = 0; t < 4; t++)
      for (int k = 0; k < 8; k++)
        sums[i] += byte_of(rows[i / 2][lane / 4 * 4 + t], k) * byte_of(columns[(lane % 4 * 2 + i % 2) * 4 + t], k);
}

static int __popc(u32 x) { return __builtin_popcount(x); }
static int __ffs(u32 x) { return __builtin_ffs(x); }
static u32 permuted(u32 x, u32 y, u32 which) {
  u32 found = 0;
  for (int i = 0; i < 4; i++) {
    const int byte = byte_of((u64)y << 32 | x, which >> 4 * i & 7);
    found |= (which >> 4 * i & 8 ? (byte < 0 ? 255u : 0u) : byte & 255u) << 8 * i;
  }
  return found;
}
static int __dp4a(int a, int b, int sum) {
  for (int i = 0; i < 4; i++) sum += byte_of((u32)a, i) * byte_of((u32)b, i);
  return sum;
}
static float __int_as_float(u32 x) {
  float found;
  memcpy(&found, &x, sizeof x);
  return found;
}
static int __float_as_int(float x) {
  int found;
  memcpy(&found, &x, sizeof x);
  return found;
}
static int atomicAdd(int* at, int x) {
  *at += x;
  return *at - x;
}

// Run `thread` as each thread of each cluster of a grid (CLUSTER, heads, batch) with so many bytes of shared memory.
template <class Thread>
static void run_grid(int heads, int batch, long bytes, unsigned seed, Thread thread) {
  static Thread* what;
  what = &thread;
  std::mt19937 random(seed);
  std::vector<int> warps(ALL_THREADS / 32);
  for (size_t i = 0; i < warps.size(); i++) warps[i] = i;
  for (u8*& block : shared) block = (u8*)aligned_alloc(64, (bytes + 63) / 64 * 64);
  for (int pair = 0; pair < heads * batch; pair++) {
    blockIdx.y = pair % heads, blockIdx.z = pair / heads;
    for (u8* block : shared) memset(block, 0xee, bytes);
    for (Barrier& barrier : of_warp) barrier = {};
    for (Barrier& barrier : of_block) barrier = {};
    of_cluster = {}, ended = 0;
    for (Fibre& one : fibres) {
      one.stack.resize(1 << 15);
      one.ended = false, one.arrived = one.waited = one.turn = 0;
      getcontext(&one.context);
      one.context.uc_stack.ss_sp = one.stack.data(), one.context.uc_stack.ss_size = one.stack.size();
      one.context.uc_link = &scheduler;
      makecontext(&one.context, (void (*)())(+[] {
        threadIdx.x = now % THREADS, blockIdx.x = now / THREADS;
        (*what)();
        fibres[now].ended = moved = true, ended++;
      }), 0);
    }
    for (bool any = true; ended < ALL_THREADS;) {
      must(any, "threads wait for ever");
      any = false;
      std::shuffle(warps.begin(), warps.end(), random);
      for (const int warp : warps)
        for (moved = true; moved; any |= moved) {
          moved = false;
          for (now = warp * 32; now < warp * 32 + 32; now++)
            if (!fibres[now].ended) {
              const int own = now;
              swapcontext(&scheduler, &fibres[own].context);
              now = own;
            }
        }
    }
  }
  for (u8* block : shared) free(block);
}
