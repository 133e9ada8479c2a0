// What CUDA C++ needs of a thread-block cluster on sm_90, without the toolkit's headers. The tests have the same functions for a CPU.
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
#define DEVICE __device__ __forceinline__
#define DEVICE_COLD __device__ __noinline__
#define KERNEL(name) extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 65536 / 128 / THREADS) name
extern __shared__ __align__(16) u8 dynamic_shared[];

DEVICE u8* shared_memory() { return dynamic_shared; }

// Wait for the previous kernel to finish, then let the next one start.
DEVICE void follow() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// The address that a block of the cluster has for what stands at `own` in this one's shared memory.
DEVICE u32 remote(const void* own, int rank) {
  u32 at;
  asm("{ .reg .u64 a; .reg .u32 b; cvta.to.shared.u64 a, %1; cvt.u32.u64 b, a; mapa.shared::cluster.u32 %0, b, %2; }"
      : "=r"(at) : "l"(own), "r"(rank));
  return at;
}
DEVICE void put(int* own, int rank, int x) {
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(remote(own, rank)), "r"(x) : "memory");
}
DEVICE int get(const int* own, int rank) {
  int x;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(x) : "r"(remote(own, rank)) : "memory");
  return x;
}
DEVICE int add(int* own, int rank, int x) {  // what was there
  int before;
  asm volatile("atom.shared::cluster.add.u32 %0, [%1], %2;" : "=r"(before) : "r"(remote(own, rank)), "r"(x) : "memory");
  return before;
}
DEVICE void put(u64* own, int rank, u64 x) {
  asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(remote(own, rank)), "l"(x) : "memory");
}
DEVICE void put(float2* own, int rank, float2 x) {
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(remote(own, rank)), "f"(x.x), "f"(x.y) : "memory");
}

// sums = start + 16 x 32 signed bytes (rows lane / 4 and lane / 4 + 8) times 32 x 8.
DEVICE void multiply(int (&sums)[4], const u32 (&a)[4], const u32 (&b)[2], int start) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
      : "=r"(sums[0]), "=r"(sums[1]), "=r"(sums[2]), "=r"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(start));
}

// Bytes of y and x; those whose selector has the bit 8 are filled with the sign. __byte_perm drops that bit.
DEVICE u32 permuted(u32 x, u32 y, u32 which) {
  u32 found;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(found) : "r"(x), "r"(y), "r"(which));
  return found;
}
