// The experts of pairs, as the router has chosen them.
//
// Reads before the wait for the previous kernel go to L2: a line in L1 may be stale, from an earlier
// kernel that used the same memory.

struct Routes {
  const void* ids;
  int id_bytes, pairs, experts;

  // The expert of a pair, -1 for none.
  __device__ int expert(int pair) const {
    const long long id = id_bytes == 8 ? __ldcg((const long long*)ids + pair) : __ldcg((const int*)ids + pair);
    return id >= 0 && id < experts ? (int)id : -1;
  }
};
