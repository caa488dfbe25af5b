// The tiles of tokens of all experts, and how few pairs are sorted into them.
// The rows of a tile are consecutive; its last rows may belong to no pair.

// A tile of TILE_TOKENS rows, which the rows of the next tile follow.
struct TokenTile {
  int expert, rows;  // rows of all tiles of the expert
  int place;         // index among the tiles of the expert << 16 | number of these tiles
  int stored;        // parts of the tile's intermediate, counted by the blocks that store them
};

__device__ __forceinline__ int inclusive_sum(int value) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int other = __shfl_up_sync(~0u, value, d);
    if (lane >= d) value += other;
  }
  return value;
}

// Sorts at most FEW_PAIRS pairs: up to 32 by one warp, more by comparing each with each, which takes two
// barriers.
struct FewPairs {
  int4 experts[FEW_PAIRS / 4], ranks[FEW_PAIRS / 4];  // a rank counts earlier pairs of the expert
  TokenTile tiles[FEW_PAIRS];
  int count;  // of tiles

  // Calls store(pair, row) for each pair of this thread, with row -1 if it has no expert. Ends with a barrier.
  template <typename Store>
  __device__ void sort(const Routes& routes, int threads, int warp_of_block, Store store) {
    if (routes.pairs > 32)
      sort_in_block(routes, threads, store);
    else if (threadIdx.x / 32 == warp_of_block)
      sort_in_warp(routes, store);
    __syncthreads();
  }

  // Orders experts by their first occurrence.
  template <typename Store>
  __device__ __forceinline__ void sort_in_warp(const Routes& routes, Store store) {
    const int lane = threadIdx.x % 32, expert = lane < routes.pairs ? routes.expert(lane) : -1;
    const u32 same = __match_any_sync(~0u, expert);
    const int first = __ffs(same) - 1, rank = __popc(same & ((1u << lane) - 1)), rows = __popc(same);
    const int tiled = expert < 0 ? 0 : (rows + TILE_TOKENS - 1) / TILE_TOKENS, place = rank / TILE_TOKENS;
    const int through = inclusive_sum(lane == first ? tiled : 0);
    const int tile = __shfl_sync(~0u, through, first) - tiled + place;
    if (expert >= 0 && rank % TILE_TOKENS == 0) tiles[tile] = {expert, rows, place << 16 | tiled, 0};
    if (lane == 31) count = through;
    if (lane < routes.pairs) store(lane, expert < 0 ? -1 : tile * TILE_TOKENS + rank % TILE_TOKENS);
  }

  // Orders experts by their ids.
  template <typename Store>
  __device__ __forceinline__ void sort_in_block(const Routes& routes, int threads, Store store) {
    int* const expert_of = (int*)experts;
    int* const rank_of = (int*)ranks;
    const int padded = (routes.pairs + 3) / 4;
    for (int i = threadIdx.x; i < padded * 4; i += threads)
      expert_of[i] = i < routes.pairs ? routes.expert(i) : -1;
    __syncthreads();
    for (int i = threadIdx.x; i < padded * 4; i += threads) {
      int rank = 0;
      for (int j = 0; j < padded; j++) {
        const int4 other = experts[j];
        const int expert = expert_of[i];
        rank += (other.x == expert && 4 * j < i) + (other.y == expert && 4 * j + 1 < i) +
                (other.z == expert && 4 * j + 2 < i) + (other.w == expert && 4 * j + 3 < i);
      }
      rank_of[i] = rank;
    }
    if (threadIdx.x == 0) count = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < routes.pairs; i += threads) {
      const int expert = expert_of[i], rank = rank_of[i];
      // tiles that pairs of smaller experts begin, and rows of this expert
      int before = 0, rows = 0;
      auto compare = [&](int other, int other_rank) {
        before += other >= 0 && other < expert && other_rank % TILE_TOKENS == 0;
        rows += other == expert;
      };
      for (int j = 0; j < padded; j++) {
        const int4 other = experts[j], other_rank = ranks[j];
        compare(other.x, other_rank.x);
        compare(other.y, other_rank.y);
        compare(other.z, other_rank.z);
        compare(other.w, other_rank.w);
      }
      const int place = rank / TILE_TOKENS, tile = before + place;
      if (expert >= 0 && rank % TILE_TOKENS == 0) {
        tiles[tile] = {expert, rows, place << 16 | (rows + TILE_TOKENS - 1) / TILE_TOKENS, 0};
        atomicAdd(&count, 1);
      }
      store(i, expert < 0 ? -1 : tile * TILE_TOKENS + rank % TILE_TOKENS);
    }
  }
};
