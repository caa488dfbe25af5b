// The cluster that shares weights, and the order of the tiles.

// The other block of a cluster of two whose tiles have the same weights: L2 serves loads that are
// issued together only once. The blocks synchronize every few steps, as they would drift apart.
struct ClusterPeer {
  u32 here, there, parity = 0;

  __device__ explicit ClusterPeer(const u64* barrier) : here(shared(barrier)) {
    asm("{\n.reg .b32 other;\nmov.u32 other, %%cluster_ctarank;\nxor.b32 other, other, 1;\n"
        "mapa.shared::cluster.u32 %0, %1, other;\n}" : "=r"(there) : "r"(here));
  }
  __device__ void synchronize() {
    if (elect_one()) {
      barrier_arrive(here);
      asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(there) : "memory");
    }
    barrier_wait(here, parity);
    parity ^= 1;
  }
};

// The tile order, computed by the host because divisions would delay the first load. A band of token
// tiles meets all weights, then the next band does. In each full wave every block has a whole tile.
struct Schedule {
  int band;          // token tiles
  u32 band_inverse;  // 2^32 / band, rounded up: exact while dividend * band < 2^32
  int full_waves;
};

// The tiles of a block, wave by wave: whole tiles, and at the end one that its cluster splits along K.
struct TileScheduler {
  Schedule schedule;
  int rank, w_tiles, t_tiles, steps;  // steps of 128 along K
  int tail_tiles, tail_splits;        // tiles after the full waves, and whether K of these is split
  // the present tile: its place, first K step and number of K steps
  int wave = -1, band = 0, n0, t0, first_step, step_count;

  __device__ TileScheduler(const Schedule& schedule, int m, int n, int k, int rank)
      : schedule(schedule), rank(rank) {
    const int blocks = gridDim.x;
    w_tiles = (n + TILE_WEIGHTS - 1) / TILE_WEIGHTS;
    t_tiles = ONE_TOKEN_TILE ? 1 : (m + TILE_TOKENS - 1) / TILE_TOKENS;
    steps = (k + TILE_K - 1) / TILE_K;
    tail_tiles = w_tiles * t_tiles - schedule.full_waves * blocks;
    tail_splits = SPLIT_K > 1 && tail_tiles > 0 && tail_tiles <= blocks / SPLIT_K;
    next();
  }
  __device__ int waves() const { return schedule.full_waves + (tail_tiles > 0); }
  __device__ bool splits() const { return tail_splits && wave == schedule.full_waves; }
  __device__ bool more() const { return wave < waves(); }
  // Steps beyond K load zeros, to fill up PIPELINED_STEPS; they do not change where K is split.
  __device__ void next() {
    wave++;
    const int tile = wave * gridDim.x + (splits() ? blockIdx.x / SPLIT_K : blockIdx.x);
    if (tile >= w_tiles * t_tiles) {  // none is left for this block
      wave = waves();
      return;
    }
    while (!ONE_TOKEN_TILE && tile >= (band + 1) * schedule.band * w_tiles) band++;
    const int in_band = tile - band * schedule.band * w_tiles, width = t_tiles - band * schedule.band;
    const int w_tile = ONE_TOKEN_TILE          ? tile
                       : width >= schedule.band ? (int)__umulhi(in_band, schedule.band_inverse)
                                                : in_band / width;
    n0 = w_tile * TILE_WEIGHTS;
    t0 = ONE_TOKEN_TILE
             ? 0
             : (band * schedule.band + in_band - w_tile * min(width, schedule.band)) * TILE_TOKENS;
    const int part = splits() ? ((steps + SPLIT_K - 1) / SPLIT_K + 3) / 4 * 4 : steps;
    first_step = splits() ? rank * part : 0;
    step_count = (max(0, min(part, steps - first_step)) + PIPELINED_STEPS - 1) / PIPELINED_STEPS *
                 PIPELINED_STEPS;
  }
};
