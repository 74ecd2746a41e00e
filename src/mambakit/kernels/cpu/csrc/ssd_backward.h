// The SSD core backwards, from its inputs alone; docs/math.md, "The recalculated backward".
//
// A thread takes a few heads through the sequence at a time. It recomputes the states that enter the chunks and then
// visits the chunks last to first, so that c . b and its gradient are there for all of these heads of a group at once. Of a
// long sequence it keeps the states for one stretch of chunks, the last first, and recomputes them from that before it.
#pragma once

#include "border.h"
#include "ssd.h"

namespace MK_ISA {
namespace ssd {

struct SsdBackward {
    MK_FIELDS(SsdBackward,
        Ssd inputs;
        Sequence d_y_bsmhp;
        const float* d_last_bhpr;
        void *d_v_bsmhp, *d_b_bsmgr, *d_c_bsmgr;
        float *d_da_bsh, *d_w_now_bsh, *d_w_later_bsh, *d_state_bhpr;
        bool narrow_sides;  // d_b and d_c are bfloat16: where no two heads add to the same
        // Heads are split into `ranges`. One that begins inside a group adds to B and C of that group here, [range - 1][B, C]
        // s m r, until all are done: sums in a fixed order, whatever thread is first.
        int64_t ranges;
        float* shares;
    )
};

// Heads that are taken through the sequence together, and the most rows for which their states are kept: what bounds the
// memory of a thread.
constexpr int64_t HEADS_AT_ONCE = 4;
constexpr int64_t STRETCH_ROWS = 2048;

struct BackwardBuffers {
    int64_t stretch, stretches;  // chunks of a stretch
    Chunk chunk;
    Decays decays;
    float *b, *c, *b_t, *c_t;             // q x R, R x Q: words by rows, and across
    float *v, *d_y, *v_t, *d_y_t;         // q x P, P x Q: the same
    float *weighed, *d_v;                 // q x P
    float *mixed, *d_mixed;               // q x Q
    float *product, *d_product;           // q x Q: c . b
    float *d_b_t, *d_c_t;                 // R x Q
    float *d_start, *d_weight, *d_later;  // Q: gradients of from_start, of to_end w_later, of decayed w_later
    double* d_da;                         // of one chunk
    float* states;                        // stretch x heads x r x P: entering each chunk
    float* kept;                          // stretches x heads x r x P: entering each stretch
    float* d_states;                      // heads x r x P
    // Rooms for factors: q x R; q x P; q x Q; r x P.
    float *b_room, *c_room, *d_y_room, *mixed_room, *state_room, *d_state_room, *d_state_down;
    const float *b_down, *c_down;  // B and C in words down

    int64_t lay_out(const Ssd& x, int64_t heads, float* block) {
        Arena arena{block};
        int64_t q = x.rows(), P = x.P(), Q = x.Q(), R = x.R(), one = x.r * P;
        stretch = STRETCH_ROWS / q > 1 ? STRETCH_ROWS / q : 1;
        stretch = least(stretch, x.chunks());
        stretches = ceil_div(x.chunks(), stretch);
        decays.lay_out(arena, x);
        chunk.first_row = arena.integers(x.chunk_len);
        b = arena.floats(q * R);
        c = arena.floats(q * R);
        b_t = arena.floats(R * Q);
        c_t = arena.floats(R * Q);
        v = arena.floats(q * P);
        d_y = arena.floats(q * P);
        v_t = arena.floats(P * Q);
        d_y_t = arena.floats(P * Q);
        weighed = arena.floats(q * P);
        d_v = arena.floats(q * P);
        mixed = arena.floats(q * Q);
        d_mixed = arena.floats(q * Q);
        product = arena.floats(q * Q);
        d_product = arena.floats(q * Q);
        d_b_t = arena.floats(R * Q);
        d_c_t = arena.floats(R * Q);
        d_start = arena.floats(Q);
        d_weight = arena.floats(Q);
        d_later = arena.floats(Q);
        d_da = arena.doubles(x.chunk_len);
        states = arena.floats(stretch * heads * one);
        kept = arena.floats(stretches * heads * one);
        d_states = arena.floats(heads * one);
        int64_t rooms = x.narrow;
        b_room = arena.floats(rooms * q * R);
        c_room = arena.floats(rooms * q * R);
        d_y_room = arena.floats(rooms * q * P);
        mixed_room = arena.floats(rooms * q * Q);
        state_room = arena.floats(rooms * one);
        d_state_room = arena.floats(rooms * one);
        d_state_down = arena.floats(rooms * one);
        return arena.used;
    }
};

// Where the gradients of B and C go, and whether other heads have been there before.
struct Sides {
    void *d_b, *d_c;
    int64_t ld;
    bool add, narrow;
};

// From d_mixed = d_y . v: mixed for the gradient of v, and the gradients of c . b (added), of w_now, of w_later as far as
// the chunk itself reads it (d_later, per row), and of the log-decays between its pairs.
static void weigh_pairs(const Ssd& x, const Chunk& c, const Decays& d, BackwardBuffers& at, float* d_w_now) {
    const float* product = at.product;
    float* d_product = at.d_product;
    int64_t Q = x.Q(), m = x.m, width = round_up(c.q, W);
    clear(at.d_later, Q);
    // From the last token up: when token k is reached, d_later holds the pairs whose reader is k or later, and those of
    // them whose writer is earlier than k are the ones that k lies between.
    for (int64_t l = c.len - 1; l >= 0; l--) {
        int64_t row = l * m, j = 0;
        for (; j < row + m; j += W) {
            vf decay = pair_decay(x, c, d, l, j), weight = pair_weight(x, d, l, j, decay), d_pair = {};
            for (int64_t i = row * Q + j; i < (row + m) * Q; i += Q) {
                vf one = load(product + i), d_one = load(at.d_mixed + i);
                store(at.mixed + i, weight * one);
                store(d_product + i, load(d_product + i) + weight * d_one);
                d_pair += one * d_one;
            }
            store(at.d_later + j, load(at.d_later + j) + decay * d_pair);
        }
        for (; j < width; j += W)
            for (int64_t i = row; i < row + m; i++) store(at.mixed + i * Q + j, vf{});

        float own = 0;
        for (int64_t i = row; i < row + m; i++)
            for (int64_t t = row; t < row + m; t++) own += at.d_mixed[i * Q + t] * product[i * Q + t];
        d_w_now[(c.start + l) * x.h] = own;

        vf crossing = {};
        for (int64_t t = 0; t < row; t += W) {
            vf d_gap = load(at.d_later + t) * load(d.w_later + t);
            crossing += choose(column_numbers(t) < splat_int((int32_t)row), d_gap, vf{});
        }
        at.d_da[l] = sum(crossing);
    }
}

// Of a product side . state with the state of a head, scaled by row: adds the gradient of the transposed side, and
// leaves that of the scale. right_t is the other factor of the gradient, d_y or v. The state is words by rows, right_t
// and side_t are words across.
template <class Factors>
static void side_backward(const Ssd& x, int64_t q, const float* state, const float* right_t, const float* side_t,
                          const float* scale, float* d_side_t, float* d_scale) {
    int64_t P = x.P() / Factors::HELD, Q = x.Q();
    clear(d_scale, Q);
    column_tiles(round_up(q, W) / W, [&](auto columns, int64_t j) {
        constexpr int N = decltype(columns)::value;
        row_tiles(x.r, [&](auto rows, int64_t i) {
            constexpr int M = decltype(rows)::value;
            Tile<M, N> tile;
            tile.clear();
            tile.template add_product<false, Factors>(state + i * P, P, right_t + j * W, Q, words<Factors>(x.p));
            MK_UNROLLED(int k = 0; k < N; k++) {
                int64_t column = (j + k) * W;
                vf factor = load(scale + column), total = load(d_scale + column);
                MK_UNROLLED(int a = 0; a < M; a++) {
                    int64_t here = (i + a) * Q + column;
                    total += tile.at[a][k] * numbers_of<Factors>(side_t, Q, i, a, column);
                    store(d_side_t + here, load(d_side_t + here) + factor * tile.at[a][k]);
                }
                store(d_scale + column, total);
            }
        });
    });
}

// d_v = diag(weight) B d_last + mixed^T d_y. B is words by rows, the others are words down.
template <class Factors>
static void values_backward(const Ssd& x, int64_t q, const float* b, const float* d_last, const float* weight,
                            const float* mixed, const float* d_y, float* d_v, int64_t ld) {
    int64_t P = x.P(), R = x.R() / Factors::HELD, Q = x.Q(), all = words<Factors>(q);
    column_tiles(P / W, [&](auto columns, int64_t j) {
        row_tiles(q, [&](auto rows, int64_t i) {
            Tile<decltype(rows)::value, decltype(columns)::value> tile;
            tile.clear();
            tile.template add_product<false, Factors>(b + i * R, R, d_last + j * W, P, words<Factors>(x.r));
            tile.scale_rows(weight + i);
            int64_t reader = i / x.m * x.m / Factors::HELD;  // no earlier one reads these rows
            tile.template add_product<true, Factors>(mixed + reader * Q + i, Q, d_y + reader * P + j * W, P, all - reader);
            tile.store_to(d_v + i * ld + j * W, ld);
        });
    });
}

static double inner_product(const float* a, const float* b, int64_t n) {
    vf total[4] = {};
    int64_t i = 0;
    for (; i + 4 * W <= n; i += 4 * W)
        for (int k = 0; k < 4; k++) total[k] += load(a + i + k * W) * load(b + i + k * W);
    for (; i < n; i += W) total[0] += load(a + i) * load(b + i);
    return sum((total[0] + total[1]) + (total[2] + total[3]));
}

// The gradients of the log-decays and of w_later from those of the four exponents; see the table in docs/math.md.
static void tokens_backward(const Ssd& x, const Chunk& c, const Decays& d, BackwardBuffers& at, double d_carry,
                            float* d_da, float* d_w_later) {
    int64_t m = x.m;
    double up_to_here = 0;
    for (int64_t l = 0; l < c.len; l++) {
        double d_weight = 0, d_later = 0;
        for (int64_t i = l * m; i < (l + 1) * m; i++) d_weight += at.d_weight[i], d_later += at.d_later[i];
        double end = d.to_end[l * m];
        d_w_later[(c.start + l) * x.h] = (float)(d_later + end * d_weight);
        at.d_da[l] += d_carry + up_to_here;
        up_to_here += end * d.w_later[l * m] * d_weight;
    }
    double from_here = 0;
    for (int64_t l = c.len - 1; l >= 0; l--) {
        for (int64_t i = l * m; i < (l + 1) * m; i++) from_here += (double)d.from_start[i] * at.d_start[i];
        d_da[(c.start + l) * x.h] = (float)(at.d_da[l] + from_here);
    }
}

// One chunk of one head: `state` entered it, d_state comes in for the state that left it and goes out for `state`.
template <class Factors>
static void backward_chunk(const Ssd& x, const SsdBackward& grads, int64_t head, const Heads& heads,
                           BackwardBuffers& at, const float* state, float* d_state) {
    const Chunk& c = at.chunk;
    Decays& d = at.decays;
    int64_t P = x.P(), Q = x.Q(), width = round_up(c.q, W), ld = P / Factors::HELD, count = words<Factors>(x.p);
    gather_values<Factors>(x, x.v_bsmhp, c, head, heads, -x.chunk_len, at.v);
    gather_values<Factors>(x, grads.d_y_bsmhp, c, head, heads, -x.chunk_len, at.d_y);
    transpose(at.v, ld, c.q, count, at.v_t, Q, width);
    transpose(at.d_y, ld, c.q, count, at.d_y_t, Q, width);
    find_decays(x, c, head, d);

    int64_t tokens = c.batch * x.s * x.h + head;
    lower_product<Factors>(c.q, x.m, at.d_y, ld, at.v_t, Q, count, at.d_mixed, Q);
    weigh_pairs(x, c, d, at, grads.d_w_now_bsh + tokens);

    const float* state_rows = as_rows<Factors>(state, x.r, P, at.state_room);
    const float* d_state_rows = as_rows<Factors>(d_state, x.r, P, at.d_state_room);
    side_backward<Factors>(x, c.q, state_rows, at.d_y_t, at.c_t, d.from_start, at.d_c_t, at.d_start);
    float* weight = d.sum_high;  // not needed any more
    for (int64_t k = 0; k < width; k++) weight[k] = d.to_end[k] * d.w_later[k];
    side_backward<Factors>(x, c.q, d_state_rows, at.v_t, at.b_t, weight, at.d_b_t, at.d_weight);
    double d_carry = d.over * inner_product(state, d_state, x.r * P);
    tokens_backward(x, c, d, at, d_carry, grads.d_da_bsh + tokens, grads.d_w_later_bsh + tokens);

    int64_t place = ((c.batch * x.s + c.start) * x.m * x.h + head) * x.p, ld_v = x.h * x.p;
    bool directly = x.p == P && !x.narrow;
    float* d_v = directly ? (float*)grads.d_v_bsmhp + place : at.d_v;
    values_backward<Factors>(x, c.q, at.b, as_down<Factors>(d_state, x.r, P, at.d_state_down), weight,
                             as_down<Factors>(at.mixed, c.q, Q, at.mixed_room),
                             rows_as_down<Factors>(at.d_y, c.q, P, at.d_y_room), d_v, directly ? ld_v : P);
    if (!directly)
        with_numbers(x.narrow, MK_BODY(auto number) {
            scatter_rows<Factors>(at.d_v, P, c.q, x.p, (decltype(number)*)grads.d_v_bsmhp + place, ld_v, false);
        });

    weigh_rows_down<Factors>(at.d_y, c.q, P, MK_BODY(int64_t i) { return d.from_start[i]; }, at.weighed);
    pass_chunk<Factors>(x, c.q, at.c_down, at.weighed, nullptr, d.over, d_state, d_state);
}

// B and C of a chunk and what the heads of their group share; their gradients start at zero.
template <class Factors>
static void begin_sides(const Ssd& x, int64_t group, const Heads& heads, BackwardBuffers& at) {
    const Chunk& c = at.chunk;
    int64_t Q = x.Q(), R = x.R(), ld = R / Factors::HELD, count = words<Factors>(x.r), width = round_up(c.q, W);
    gather_side<Factors>(x, x.b_bsmgr, c, group, heads, -x.chunk_len, at.b);
    gather_side<Factors>(x, x.c_bsmgr, c, group, heads, -x.chunk_len, at.c);
    at.b_down = rows_as_down<Factors>(at.b, c.q, R, at.b_room);
    at.c_down = rows_as_down<Factors>(at.c, c.q, R, at.c_room);
    transpose(at.b, ld, c.q, count, at.b_t, Q, width);
    transpose(at.c, ld, c.q, count, at.c_t, Q, width);
    lower_product<Factors>(c.q, x.m, at.c, ld, at.b_t, Q, count, at.product, Q);
    clear(at.d_product, c.q * Q);
    clear(at.d_b_t, x.r * Q);
    clear(at.d_c_t, x.r * Q);
}

// The gradients of B and C from what the heads have added up: d_c = d_product b, d_b = d_product^T c, and the parts of
// the states.
template <class Factors>
static void finish_sides(const Ssd& x, BackwardBuffers& at, const Sides& sides) {
    const Chunk& c = at.chunk;
    int64_t Q = x.Q(), ld = Q / Factors::HELD, R = x.R(), m = x.m, all = words<Factors>(c.q);
    // The transposed sides and pairs of one head are not needed any more, and there is room enough.
    float *d_b = at.b_t, *d_c = at.c_t;
    transpose(at.d_b_t, Q, x.r, c.q, d_b, R, R);
    transpose(at.d_c_t, Q, x.r, c.q, d_c, R, R);
    const float* d_rows = as_rows<Factors>(at.d_product, c.q, Q, at.mixed);
    const float* d_down = as_down<Factors>(at.d_product, c.q, Q, at.mixed_room);
    column_tiles(R / W, [&](auto columns, int64_t j) {
        row_tiles(c.q, [&](auto rows, int64_t k) {
            constexpr int M = decltype(rows)::value;
            Tile<M, decltype(columns)::value> tile;
            tile.clear();
            int64_t count = words<Factors>(reach(k + M - 1, m));
            tile.template add_product<false, Factors>(d_rows + k * ld, ld, at.b_down + j * W, R, count);
            tile.add_scaled(1.0f, d_c + k * R + j * W, R);
            tile.store_to(d_c + k * R + j * W, R);
            int64_t reader = k / m * m / Factors::HELD;  // no earlier one reads these rows
            tile.clear();
            tile.template add_product<true, Factors>(d_down + reader * Q + k, Q, at.c_down + reader * R + j * W, R,
                                                     all - reader);
            tile.add_scaled(1.0f, d_b + k * R + j * W, R);
            tile.store_to(d_b + k * R + j * W, R);
        });
    });
    with_numbers(sides.narrow, MK_BODY(auto number) {
        auto put = MK_BODY(const float* from, void* to) {
            scatter_rows<Factors>(from, R, c.q, x.r, (decltype(number)*)to + c.start * m * sides.ld, sides.ld, sides.add);
        };
        put(d_b, sides.d_b);
        put(d_c, sides.d_c);
    });
}

// The states of all heads over chunk n.
template <class Factors>
static void advance_heads(const Ssd& x, const Heads& heads, int64_t n, BackwardBuffers& at, const float* from,
                          float* to) {
    const Chunk& c = at.chunk;
    int64_t one = x.r * x.P();
    cut(x, heads.batch, n, at.chunk);
    for_groups(x, heads, [&](int64_t group, int64_t first, int64_t last) {
        gather_side<Factors>(x, x.b_bsmgr, c, group, heads, x.chunk_len, at.b);
        const float* b = rows_as_down<Factors>(at.b, c.q, x.R(), at.b_room);
        for (int64_t head = first; head < last; head++) {
            gather_values<Factors>(x, x.v_bsmhp, c, head, heads, x.chunk_len, at.v);
            find_decays(x, c, head, at.decays);
            int64_t here = (head - heads.first) * one;
            advance<Factors, false>(x, c, at.decays, b, at.v, at.weighed, from + here, to + here);
        }
    });
}

// Where the gradients of a group's B and C go, for heads from `first` on. The heads of a range that begins inside a
// group leave theirs in the range's share.
static Sides find_sides(const Ssd& x, const SsdBackward& grads, int64_t batch, int64_t group, int64_t first,
                        const Heads& whole, int64_t range) {
    int64_t rows = x.s * x.m, group_first = group * (x.h / x.g);
    bool add = first > group_first && first > whole.first;
    if (whole.first <= group_first) {
        int64_t here = (batch * rows * x.g + group) * x.r;
        here *= grads.narrow_sides ? sizeof(bfloat16) : sizeof(float);
        return {(char*)grads.d_b_bsmgr + here, (char*)grads.d_c_bsmgr + here, x.g * x.r, add, grads.narrow_sides};
    }
    float* share = grads.shares + (range - 1) * 2 * rows * x.r;
    return {share, share + rows * x.r, x.r, add, false};
}

// `heads` are some of the `whole` ones that the range has in this row of the batch.
template <class Factors>
static void backward_heads(const Ssd& x, const SsdBackward& grads, const Heads& heads, const Heads& whole,
                           int64_t range) {
    BackwardBuffers at;
    at.lay_out(x, heads.count(), scratch<SSD_CHUNK>(at.lay_out(x, heads.count(), nullptr)));
    int64_t P = x.P(), one = x.r * P, all = heads.count() * one, begin = (heads.batch * x.h + heads.first) * x.p * x.r;
    for (int64_t k = 0; k < heads.count(); k++) {
        transpose(x.state_bhpr + begin + k * x.p * x.r, x.r, x.p, x.r, at.kept + k * one, P, P);
        transpose(grads.d_last_bhpr + begin + k * x.p * x.r, x.r, x.p, x.r, at.d_states + k * one, P, P);
    }
    for (int64_t n = 0; n < (at.stretches - 1) * at.stretch; n++) {
        float* to = at.kept + (n / at.stretch + 1) * all;
        advance_heads<Factors>(x, heads, n, at, n % at.stretch ? to : to - all, to);
    }
    for (int64_t k = at.stretches - 1; k >= 0; k--) {
        int64_t start = k * at.stretch, stop = least(start + at.stretch, x.chunks());
        copy(at.kept + k * all, all, at.states);
        for (int64_t n = start; n < stop - 1; n++) {
            float* entering = at.states + (n - start) * all;
            advance_heads<Factors>(x, heads, n, at, entering, entering + all);
        }
        for (int64_t n = stop - 1; n >= start; n--) {
            cut(x, heads.batch, n, at.chunk);
            for_groups(x, heads, [&](int64_t group, int64_t first, int64_t last) {
                begin_sides<Factors>(x, group, heads, at);
                for (int64_t head = first; head < last; head++) {
                    int64_t here = (head - heads.first) * one;
                    backward_chunk<Factors>(x, grads, head, heads, at, at.states + (n - start) * all + here,
                                            at.d_states + here);
                }
                finish_sides<Factors>(x, at, find_sides(x, grads, heads.batch, group, first, whole, range));
            });
        }
    }
    for (int64_t k = 0; k < heads.count(); k++)
        transpose(at.d_states + k * one, P, x.r, x.p, grads.d_state_bhpr + begin + k * x.p * x.r, x.r, x.r);
}

// Adds what the ranges that began inside a group found for it.
static void add_shares(const Ssd& x, const SsdBackward& grads) {
    int64_t per_group = x.h / x.g, rows = x.s * x.m, ld = x.g * x.r;
    for (int64_t range = 1; range < grads.ranges; range++) {
        int64_t head = x.b * x.h * range / grads.ranges;
        if (head % per_group == 0) continue;
        int64_t here = (head / x.h * rows * x.g + head % x.h / per_group) * x.r;
        const float* share = grads.shares + (range - 1) * 2 * rows * x.r;
        parallel(rows, [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; i++)
                for (int64_t j = 0; j < x.r; j++) {
                    ((float*)grads.d_b_bsmgr)[here + i * ld + j] += share[i * x.r + j];
                    ((float*)grads.d_c_bsmgr)[here + i * ld + j] += share[(rows + i) * x.r + j];
                }
        });
    }
}

}  // namespace ssd

using ssd::SsdBackward;

static void ssd_backward(const SsdBackward& call) {
    using namespace ssd;
    with_factors(call.inputs, [&](auto factors) {
        for_head_ranges(call.inputs, call.ranges, [&](const Heads& whole, int64_t range) {
            for (int64_t head = whole.first; head < whole.last; head += HEADS_AT_ONCE) {
                Heads heads{whole.batch, head, least(head + HEADS_AT_ONCE, whole.last)};
                backward_heads<decltype(factors)>(call.inputs, call, heads, whole, range);
            }
        });
    });
    add_shares(call.inputs, call);
}

}  // namespace MK_ISA
