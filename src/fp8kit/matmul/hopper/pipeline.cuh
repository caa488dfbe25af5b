// Pipeline stages and their barriers.

// A stage of a ring of shared memory, and the parity of the barrier phase that fills it.
template <int COUNT>
struct Stage {
  int index = 0;
  u32 parity = 0;

  __device__ void advance() {
    if (++index == COUNT) {
      index = 0;
      parity ^= 1;
    }
  }
};

// The mbarriers of a ring, by address.
struct Barriers {
  u32 first;

  // Opaque to keep the address in a register: the compiler would recompute the shared window each step.
  __device__ explicit Barriers(const u64* barriers) {
    asm volatile("mov.u32 %0, %1;" : "=r"(first) : "r"(shared(barriers)));
  }
  __device__ explicit Barriers(u32 address) : first(address) {}
  __device__ Barriers after(int count) const { return Barriers(first + count * 8); }
  __device__ u32 operator[](int stage) const { return first + stage * 8; }
};
