// The SSD core forwards: chunk by chunk, all heads that a thread has beside each other. c . b is formed once for those of
// a group, neighbours in memory are read one after the other, and the states stay in the cache.
#pragma once

#include "border.h"
#include "ssd.h"

namespace MK_ISA {
namespace ssd {

struct ForwardBuffers {
    Chunk chunk;
    Decays decays;
    float *b, *c, *b_t;   // q x R, q x R, R x Q: words by rows, and across
    float* product;       // q x Q: c . b
    float* mixed;         // q x Q: the same weighed for one head
    float *v, *weighed;   // q x P
    float* y;             // q x P
    float* states;        // heads x r x P
    const float* b_now;                   // b in words down
    float *b_down, *v_down, *state_down;  // rooms: q x R, q x P, r x P

    int64_t lay_out(const Ssd& x, int64_t heads, float* block) {
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
        weighed = arena.floats((q + 1) * P);
        y = arena.floats(q * P);
        states = arena.floats(heads * x.r * P);
        int64_t rooms = x.narrow;
        b_down = arena.floats(rooms * q * R);
        v_down = arena.floats(rooms * q * P);
        state_down = arena.floats(rooms * x.r * P);
        return arena.used;
    }
};

// mixed[l, t] = weight[l, t] (c_l . b_t), in words by rows
template <class Factors>
static void mix(const Ssd& x, const Chunk& c, const Decays& d, const float* product, float* mixed) {
    int64_t Q = x.Q(), width = round_up(c.q, W), ld = Q / Factors::HELD;
    for (int64_t l = 0; l < c.len; l++) {
        int64_t row = l * x.m, at = 0;
        for (; at < row + x.m; at += W) {
            vf weight = pair_weight(x, d, l, at, pair_decay(x, c, d, l, at));
            for (int64_t i = row; i < row + x.m; i++)
                put_numbers<Factors>(mixed + i * ld, at, weight * load(product + i * Q + at));
        }
        // A tile of rows reads as far as its last one reaches.
        for (; at < width; at += W)
            for (int64_t i = row; i < row + x.m; i++) put_numbers<Factors>(mixed + i * ld, at, vf{});
    }
}

// y = diag(from_start) C state + mixed V. C and mixed are words by rows, the others down.
template <class Factors>
static void read(const Ssd& x, int64_t q, const float* c, const float* state, const float* from_start,
                 const float* mixed, const float* v, float* y, int64_t ldy) {
    int64_t P = x.P(), R = x.R() / Factors::HELD, Q = x.Q() / Factors::HELD;
    column_tiles(P / W, [&](auto columns, int64_t j) {
        row_tiles(q, [&](auto rows, int64_t i) {
            constexpr int M = decltype(rows)::value;
            Tile<M, decltype(columns)::value> tile;
            tile.clear();
            tile.template add_product<false, Factors>(c + i * R, R, state + j * W, P, words<Factors>(x.r));
            tile.scale_rows(from_start + i);
            int64_t count = words<Factors>(reach(i + M - 1, x.m));
            tile.template add_product<false, Factors>(mixed + i * Q, Q, v + j * W, P, count);
            tile.store_to(y + i * ldy + j * W, ldy);
        });
    });
}

template <class Factors>
static void forward_chunk(const Ssd& x, int64_t head, const Heads& heads, ForwardBuffers& at, float* state,
                          void* y_bsmhp) {
    const Chunk& c = at.chunk;
    int64_t P = x.P();
    gather_values<Factors>(x, x.v_bsmhp, c, head, heads, x.chunk_len, at.v);
    const float* v = rows_as_down<Factors>(at.v, c.q, P, at.v_down);
    const float* entering = as_down<Factors>(state, x.r, P, at.state_down);
    find_decays(x, c, head, at.decays);
    mix<Factors>(x, c, at.decays, at.product, at.mixed);
    int64_t place = ((c.batch * x.s + c.start) * x.m * x.h + head) * x.p, ldy = x.h * x.p;
    bool directly = x.p == P && !x.narrow;
    float* y = directly ? (float*)y_bsmhp + place : at.y;
    read<Factors>(x, c.q, at.c, entering, at.decays.from_start, at.mixed, v, y, directly ? ldy : P);
    if (!directly)
        with_numbers(x.narrow, MK_BODY(auto number) {
            scatter_rows<Factors>(at.y, P, c.q, x.p, (decltype(number)*)y_bsmhp + place, ldy, false);
        });
    advance<Factors, true>(x, c, at.decays, at.b_now, at.v, at.weighed, state, state);
}

template <class Factors>
static void forward_heads(const Ssd& x, const Heads& heads, void* y_bsmhp, float* last_bhpr) {
    ForwardBuffers at;
    at.lay_out(x, heads.count(), scratch<SSD_CHUNK>(at.lay_out(x, heads.count(), nullptr)));
    int64_t P = x.P(), R = x.R(), Q = x.Q(), one = x.r * P, begin = (heads.batch * x.h + heads.first) * x.p * x.r;
    for (int64_t k = 0; k < heads.count(); k++)
        transpose(x.state_bhpr + begin + k * x.p * x.r, x.r, x.p, x.r, at.states + k * one, P, P);
    for (int64_t n = 0; n < x.chunks(); n++) {
        cut(x, heads.batch, n, at.chunk);
        int64_t q = at.chunk.q, ld = R / Factors::HELD, count = words<Factors>(x.r);
        for_groups(x, heads, [&](int64_t group, int64_t first, int64_t last) {
            gather_side<Factors>(x, x.b_bsmgr, at.chunk, group, heads, x.chunk_len, at.b);
            gather_side<Factors>(x, x.c_bsmgr, at.chunk, group, heads, x.chunk_len, at.c);
            at.b_now = rows_as_down<Factors>(at.b, q, R, at.b_down);
            transpose(at.b, ld, q, count, at.b_t, Q, round_up(q, W));
            lower_product<Factors>(q, x.m, at.c, ld, at.b_t, Q, count, at.product, Q);
            for (int64_t head = first; head < last; head++)
                forward_chunk<Factors>(x, head, heads, at, at.states + (head - heads.first) * one, y_bsmhp);
        });
    }
    for (int64_t k = 0; k < heads.count(); k++)
        transpose(at.states + k * one, P, x.r, x.p, last_bhpr + begin + k * x.p * x.r, x.r, x.r);
}

struct SsdForward {
    MK_FIELDS(SsdForward,
        Ssd inputs;
        void* y_bsmhp;
        float* last_bhpr;
    )
};

}  // namespace ssd

using ssd::SsdForward;

static void ssd_forward(const SsdForward& call) {
    const ssd::Ssd& x = call.inputs;
    ssd::with_factors(x, [&](auto factors) {
        ssd::for_head_ranges(x, least(num_threads(), x.b * x.h), [&](const ssd::Heads& heads, int64_t) {
            ssd::forward_heads<decltype(factors)>(x, heads, call.y_bsmhp, call.last_bhpr);
        });
    });
}

}  // namespace MK_ISA
