// PTX instructions by name: TMA, WGMMA, named barriers.

struct alignas(64) TensorMap { u64 opaque[16]; };

// True in one lane of a converged warp. Values that depend on the block alone stay in uniform
// registers, which TMA needs; with `lane == 0` the compiler wraps each TMA in a loop.
__device__ __forceinline__ bool elect_one() {
  u32 elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.b32 %0, 1, 0, p;\n}"
               : "=r"(elected));
  return elected;
}

__device__ __forceinline__ void tma_load(u32 to, const TensorMap* map, int col, int row, u32 barrier,
                                         u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to), "l"(map), "r"(barrier), "r"(col), "r"(row),
      "l"(policy) : "memory");
}

// Columns count bytes. The issuing thread must wait until the box has been read.
__device__ __forceinline__ void tma_store(const TensorMap* map, int col, int row, u32 from) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
               "r"(from), "r"(col), "r"(row) : "memory");
}

__device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

__device__ __forceinline__ void tma_prefetch(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Shared memory descriptor of a K-major tile with 128-byte rows and 128-byte swizzle; 8 rows are 1024
// bytes. The low word counts addresses in units of 16 bytes, so offsets can be added to it.
__device__ __forceinline__ u32 descriptor_low(u32 address) {
  return ((address >> 4) & 0x3fff) | (1u << 16);
}
__device__ __forceinline__ u64 descriptor(u32 low) { return (64ull << 32) | (1ull << 62) | low; }

// d = a @ b.T + (add ? d : 0) over 32 of K. The host spells out the registers.
__device__ __forceinline__ void wgmma(float (&d)[ACC], u64 a, u64 b, int add) {
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " WGMMA_ADD ", 0;\n" WGMMA "\n}"
               : WGMMA_REGISTERS : "l"(a), "l"(b), "r"(add));
}

// Keeps the compiler from moving accesses to the accumulators across an asynchronous MMA.
__device__ __forceinline__ void wgmma_fence_registers(float (&d)[ACC]) {
#pragma unroll
  for (int i = 0; i < ACC; i++) asm volatile("" : "+f"(d[i])::"memory");
}

template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

__device__ __forceinline__ void warpgroup_barrier(int warpgroup) {
  asm volatile("bar.sync %0, 128;" ::"r"(warpgroup + 2) : "memory");
}
