// The order in which blocks take tiles, and how they wait for rows of the first product.

// Walks over (token tile, weight tile). A band of an expert's token tiles meets all weights of the expert,
// then the next band does, so that the operands of a band stay in L2. Blocks with less other work come
// first in the order, and take some tiles by themselves before all blocks take turns. With TAKES_TURNS 0,
// a block that is done takes the next tile: see TileQueue.
struct TileWalk {
  const TokenTile* tiles;
  int w_tiles, band_tiles, order, early, early_stride, stride, total, at;
  int expert, row, end, w;  // of the present tile

  __device__ TileWalk(const TokenTile* tiles, int count, int w_tiles, int band_tiles, int order, int stride,
                      int early_blocks = 0, int early_rounds = 0)
      : tiles(tiles), w_tiles(w_tiles), band_tiles(band_tiles), order(order),
        early(early_blocks * early_rounds), early_stride(early_blocks), stride(stride), total(count * w_tiles),
        at(order < early_blocks ? order : early + order) {
    if (early == 0) at = order;
    locate();
  }
  __device__ bool more() const { return at < total; }
  __device__ void go_to(int tile) {
    at = tile;
    locate();
  }
  // The facts of the tile for other warps of the block; w = -1 ends their walk.
  __device__ int4 packed() const { return {expert, row, end, more() ? w : -1}; }
  __device__ void go_to(const int4& tile) {
    expert = tile.x, row = tile.y, end = tile.z, w = tile.w;
    at = w < 0 ? total : 0;  // this walk began at a tile of its own, which may lie behind the last
  }
  __device__ void next() {
    if (at < early) {
      at += early_stride;
      if (at >= early) at = early + order;
    } else {
      at += stride;
    }
    locate();
  }
  __device__ void locate() {
    if (!more()) return;
    const int tile = at / w_tiles;
    const int4 loaded = LISTS ? *(const int4*)(tiles + tile) : __ldcg((const int4*)(tiles + tile));
    const int place = loaded.z >> 16, count = loaded.z & 0xffff, first = tile - place;
    const int of_expert = at - first * w_tiles;
    const int band = of_expert / (band_tiles * w_tiles), in_band = of_expert - band * band_tiles * w_tiles;
    const int width = min(band_tiles, count - band * band_tiles);
    w = in_band / width;
    const int chosen = band * band_tiles + in_band - w * width;
    expert = loaded.x;
    row = (first + chosen) * TILE_TOKENS;
    end = row + min(TILE_TOKENS, loaded.y - chosen * TILE_TOKENS);
  }
};

// The tile that a block takes after the present one. As tiles differ in their time, the warp that loads
// weights takes it from a counter that all blocks share, looks it up, and tells the other warps.
struct TileQueue {
  static constexpr int SLOTS = 2, READERS = 32 * TOKEN_WARPS + CONSUMERS;  // threads
  Barriers told, read;
  u32 slots;
  u32* counter;

  // A block begins with the tile of its own index, unless one kernel computes both products: there blocks wait
  // for rows, and a tile whose rows are waited for must belong to a block that runs.
  __device__ int take() const { return (FIRST && SECOND ? 0 : gridDim.x) + atomicAdd(counter, 1); }
  __device__ void tell(Stage<SLOTS>& slot, const int4& tile) const {
    barrier_wait(read[slot.index], slot.parity ^ 1);
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(slots + slot.index * 16), "r"(tile.x),
                 "r"(tile.y), "r"(tile.z), "r"(tile.w) : "memory");
    barrier_arrive(told[slot.index]);
  }
  __device__ int4 hear(Stage<SLOTS>& slot) const {
    int4 tile;
    barrier_wait(told[slot.index], slot.parity);
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(tile.x), "=r"(tile.y), "=r"(tile.z), "=r"(tile.w)
                 : "r"(slots + slot.index * 16) : "memory");
    barrier_arrive_after(read[slot.index], tile.w);
    slot.advance();
    return tile;
  }
};

// Counts that a warpgroup has stored its part of a tile's rows.
__device__ __forceinline__ void count_stored(TokenTile* tile, int warpgroup) {
  asm volatile("fence.proxy.async.global;" ::: "memory");  // TMA will read what these threads stored
  warpgroup_barrier(warpgroup);
  if (threadIdx.x % 128 == 0)
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(&tile->stored) : "memory");
}

// Waits until all parts of a tile's rows are stored.
__device__ __forceinline__ void await_rows(const TokenTile* tile, int parts) {
  int stored;
  do
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(stored) : "l"(&tile->stored) : "memory");
  while (stored < parts);
  asm volatile("fence.proxy.async.global;" ::: "memory");
}
