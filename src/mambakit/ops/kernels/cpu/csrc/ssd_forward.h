// The SSD core forwards: chunk by chunk, all heads of a group that a thread has beside each other, so that c . b is
// formed once for them. Their states stay in the cache.
#pragma once

#include "ssd.h"

namespace MK_ISA {
namespace ssd {

struct ForwardBuffers {
    Chunk chunk;
    Decays decays;
    float *b, *c, *b_t;   // q x R, q x R, R x Q
    float* product;       // q x Q: c . b
    float* mixed;         // q x Q: the same weighed for one head
    float *v, *weighed;   // q x P
    float* y;             // q x P
    float* states;        // heads x r x P

    int64_t lay_out(const Arguments& x, int64_t heads, float* block) {
        Arena arena{block};
        int64_t q = x.rows(), P = x.P(), Q = x.Q(), R = x.R();
        decays.lay_out(arena, x);
        chunk.first_row = arena.integers(x.chunk_len);
        b = arena.floats(q * R);
        c = arena.floats(q * R);
        b_t = arena.floats(R * Q);
        product = arena.floats(q * Q);
        mixed = arena.floats(q * Q);
        v = arena.floats(q * P);
        weighed = arena.floats(q * P);
        y = arena.floats(q * P);
        states = arena.floats(heads * x.r * P);
        return arena.used;
    }
};

// mixed[l, t] = weight[l, t] (c_l . b_t)
static void mix(const Arguments& x, const Chunk& c, const Decays& d, const float* product, float* mixed) {
    int64_t Q = x.Q(), width = round_up(c.q, W);
    for (int64_t l = 0; l < c.len; l++) {
        int64_t row = l * x.m, at = 0;
        for (; at < row + x.m; at += W) {
            vf weight = pair_weight(x, d, l, at, pair_decay(x, c, d, l, at));
            for (int64_t i = row; i < row + x.m; i++) store(mixed + i * Q + at, weight * load(product + i * Q + at));
        }
        // A tile of rows reads as far as its last one reaches.
        for (; at < width; at += W)
            for (int64_t i = row; i < row + x.m; i++) store(mixed + i * Q + at, vf{});
    }
}

// y = diag(from_start) C state + mixed V
static void read(const Arguments& x, int64_t q, const float* c, const float* state, const float* from_start,
                 const float* mixed, const float* v, float* y, int64_t ldy) {
    int64_t P = x.P(), R = x.R(), Q = x.Q();
    column_tiles(P / W, [&](auto columns, int64_t j) {
        row_tiles(q, [&](auto rows, int64_t i) {
            constexpr int M = decltype(rows)::value;
            Tile<M, decltype(columns)::value> tile;
            tile.clear();
            tile.template add_product<false>(c + i * R, R, state + j * W, P, x.r);
            tile.scale_rows(from_start + i);
            tile.template add_product<false>(mixed + i * Q, Q, v + j * W, P, reach(i + M - 1, x.m));
            tile.store_to(y + i * ldy + j * W, ldy);
        });
    });
}

static void forward_chunk(const Arguments& x, int64_t head, int64_t ahead, ForwardBuffers& at, float* state,
                          float* y_bsmhp) {
    const Chunk& c = at.chunk;
    int64_t P = x.P();
    gather_rows(x.v_bsmhp, c, x.m, x.h, head, x.p, at.v, P, ahead);
    find_decays(x, c, head, at.decays);
    mix(x, c, at.decays, at.product, at.mixed);
    float* y = y_bsmhp + ((c.batch * x.s + c.start) * x.m * x.h + head) * x.p;
    int64_t ldy = x.h * x.p;
    bool whole = x.p == P;
    read(x, c.q, at.c, state, at.decays.from_start, at.mixed, at.v, whole ? y : at.y, whole ? ldy : P);
    if (!whole) scatter_rows(at.y, P, c.q, x.p, y, ldy, false);
    advance(x, c, at.decays, at.b, at.v, at.weighed, state, state);
}

static void forward_heads(const Arguments& x, int64_t batch, int64_t group, int64_t first, int64_t last, float* y_bsmhp,
                          float* last_bhpr) {
    ForwardBuffers at;
    at.lay_out(x, last - first, scratch<0>(at.lay_out(x, last - first, nullptr)));
    int64_t P = x.P(), R = x.R(), Q = x.Q(), one = x.r * P;
    for (int64_t head = first; head < last; head++)
        transpose(x.state_bhpr + (batch * x.h + head) * x.p * x.r, x.r, x.p, x.r, at.states + (head - first) * one, P, P);
    for (int64_t n = 0; n < x.chunks(); n++) {
        cut(x, batch, n, at.chunk);
        int64_t q = at.chunk.q;
        gather_rows(x.b_bsmgr, at.chunk, x.m, x.g, group, x.r, at.b, R, x.chunk_len * x.b_bsmgr.token_stride);
        gather_rows(x.c_bsmgr, at.chunk, x.m, x.g, group, x.r, at.c, R, x.chunk_len * x.c_bsmgr.token_stride);
        transpose(at.b, R, q, x.r, at.b_t, Q, round_up(q, W));
        lower_product(q, x.m, at.c, R, at.b_t, Q, x.r, at.product, Q);
        for (int64_t head = first; head < last; head++)
            forward_chunk(x, head, rows_ahead(x.v_bsmhp, x.p, head, first, last, x.chunk_len), at,
                          at.states + (head - first) * one, y_bsmhp);
    }
    for (int64_t head = first; head < last; head++)
        transpose(at.states + (head - first) * one, P, x.r, x.p, last_bhpr + (batch * x.h + head) * x.p * x.r, x.r, x.r);
}

}  // namespace ssd
}  // namespace MK_ISA

MK_EXPORT(ssd_forward)(const void* arguments, float* y_bsmhp, float* last_bhpr) {
    using namespace MK_ISA::ssd;
    const Arguments& x = *(const Arguments*)arguments;
    for_head_ranges(
        x, MK_ISA::smaller(MK_ISA::num_threads(), x.b * x.h),
        [&](int64_t batch, int64_t group, int64_t first, int64_t last, int64_t) {
            forward_heads(x, batch, group, first, last, y_bsmhp, last_bhpr);
        });
}
