// PTX instructions of mbarriers and of copies without a tensor map, by name.

__device__ __forceinline__ void barrier_init(u32 barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

// Makes initialised barriers visible to the cluster and to TMA.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Whether the phase with this parity has completed, without waiting.
__device__ __forceinline__ bool barrier_test(u32 barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{\n.reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.b32 %0, 1, 0, done;\n}" : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  return done;
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(barrier), "r"(parity) : "memory");
}

// As barrier_wait, for a phase that other blocks of the cluster complete.
__device__ __forceinline__ void barrier_wait_cluster(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(barrier), "r"(parity) : "memory");
}

// Arrives, and makes the phase wait for so many bytes of TMA, too.
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives after reads of shared memory; `read` combines all values read. The hardware may let an arrival
// overtake reads that queue behind stores of other warps, whatever the program order, unless the arrival
// depends on the values: here through two predicates that the compiler cannot fold.
// One load serves all lanes of a converged warp, so one lane's dependence is enough.
__device__ __forceinline__ void barrier_arrive_after(u32 barrier, u32 read) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.eq.u32 p, %1, 0xffffffff;\n"
      "@p mbarrier.arrive.shared::cta.b64 _, [%0];\n"
      "@!p mbarrier.arrive.shared::cta.b64 _, [%0];\n}" ::"r"(barrier), "r"(read)
      : "memory");
}

// Copies a multiple of 16 bytes; both addresses are multiples of 16, too.
__device__ __forceinline__ void bulk_load(void* to, const void* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared(to)),
               "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

// Copies 4 bytes to shared memory, for cp.async.wait_all.
__device__ __forceinline__ void copy_async(void* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared(to)), "l"(from) : "memory");
}
