// A mixture of experts as a part of a decoded model, without its shared expert: that is an MLP beside it.
//
// Only chosen experts are read, each once for all the rows that go to it.
#pragma once

#include "part.h"
#include "part_mlp.h"

namespace MK_ISA {

enum RouterRule { SOFTMAX = 0, SOFTMAX_CHOSEN = 1, SIGMOID = 2 };

struct MoeStep {
    MK_FIELDS(MoeStep,
        int64_t experts, top_k, hidden, groups, top_groups, rule, activation;
        bool gated, normalize;
        float weight_scale;
        const float* correction_bias;  // [experts], of SIGMOID alone
    )

    MlpStep mlp() const { return {activation, gated, 1.0f}; }
    int64_t wide() const { return gated ? 2 * hidden : hidden; }
};

struct MoePart {
    MK_FIELDS(MoePart,
        MoeStep step;
        Matrix router;
        Matrix experts_in, experts_out;  // one expert's rows after the other's
        Matrix latent_in, latent_out;    // no rows: experts read and write the model's width
    )
};

// The place of the largest of n, which is there whatever they are; `largest` becomes it.
MK_INLINE int64_t place_of_largest(const float* x, int64_t n, float* largest) {
    int64_t place = 0;
    for (int64_t i = 1; i < n; i++)
        if (x[i] > x[place]) place = i;
    *largest = x[place];
    return place;
}

// -infinity for the experts of all groups but those whose two best have the largest sum.
static void keep_top_groups(const MoeStep& s, float* liking, float* best) {
    const int64_t each = s.experts / s.groups;
    for (int64_t g = 0; g < s.groups; g++) {
        float *own = liking + g * each, first, second = 0.0f;
        const int64_t place = place_of_largest(own, each, &first);
        for (int64_t i = 0, seen = 0; i < each; i++)
            if (i != place && (!seen++ || own[i] > second)) second = own[i];
        best[g] = first + second;
    }
    for (int64_t left = s.top_groups; left > 0; left--) {
        float largest;
        best[place_of_largest(best, s.groups, &largest)] = -INFINITY;
    }
    for (int64_t g = 0; g < s.groups; g++)
        for (int64_t i = 0; i < each && best[g] != -INFINITY; i++) liking[g * each + i] = -INFINITY;
}

// Which experts a row goes to, and what each weighs. `room` has 2 experts floats; the logits may change.
static void choose_experts(const MoeStep& s, float* logits, float* room, int64_t* expert, float* weight) {
    const int64_t n = s.experts;
    float *liking = room, *score = logits, largest, total = 0.0f;
    copy(logits, n, liking);
    if (s.rule == SIGMOID) {
        each_vector(n, [&](int64_t i, int64_t count) {
            const vf own = vsigmoid(load_part(logits + i, count));
            store_part(score + i, own, count);
            store_part(liking + i, own + load_part(s.correction_bias + i, count), count);
        });
        if (s.top_groups < s.groups) keep_top_groups(s, liking, room + n);
    } else {
        place_of_largest(logits, n, &largest);
        each_vector(n, [&](int64_t i, int64_t count) {
            store_part(score + i, vexp(load_part(logits + i, count) - splat(largest)), count);
        });
        for (int64_t i = 0; i < n; i++) total += score[i];
    }
    float chosen = 0.0f;
    for (int64_t c = 0; c < s.top_k; c++) {
        expert[c] = place_of_largest(liking, n, &largest);
        liking[expert[c]] = -INFINITY;
        weight[c] = score[expert[c]];
        chosen += weight[c];
    }
    // A softmax over the chosen ones is the one over all, divided by their sum.
    float by = s.weight_scale;
    if (s.rule == SOFTMAX_CHOSEN || (s.rule == SOFTMAX && s.normalize)) by /= chosen;
    else if (s.rule == SOFTMAX) by /= total;
    else if (s.normalize) by /= chosen + 1e-20f;
    for (int64_t c = 0; c < s.top_k; c++) weight[c] *= by;
}

// Pairs of a row and one of its experts, in the order of the experts: those of `expert` are [first, first + count).
struct ExpertRows {
    int64_t expert, first, count;
};

// y = the rows' products with each expert's part of `m`, `each` rows of it. x[pairs][stored columns] has the inputs in the
// order of the experts; rows [begin, end) of the parts.
static void multiply_experts(
    const Matrix& m, int64_t each, const ExpertRows& rows, int64_t begin, int64_t end, const float* x, float* y) {
    const int64_t skipped = rows.expert * each, stored = stored_columns(m);
    multiply(m, skipped + begin, skipped + end, x + rows.first * stored, stored, rows.count,
             {y + rows.first * each - skipped, each, false});
}

static void run_part(const MoePart& m, const Passing& x) {
    const MoeStep& s = m.step;
    const int64_t batch = x.batch, n = s.experts, k = s.top_k, pairs = batch * k, wide = s.wide();
    const int64_t width = m.experts_in.columns, model = x.norm.width;
    const bool latent = m.latent_in.rows > 0;
    float* logits = scratch<DECODE_SMALL>(batch * n + 2 * n);
    float* weight = scratch<DECODE_DT>(pairs);
    int64_t* expert = (int64_t*)scratch<DECODE_CHOICES>(2 * (2 * pairs + 3 * n));
    int64_t* place = expert + pairs;  // of each pair in the order of the experts
    ExpertRows* chosen = (ExpertRows*)(place + pairs);
    float* input = scratch<DECODE_NORMED>(batch * width);
    project_normed(m.router, x, {logits, n, false});
    for (int64_t row = 0; row < batch; row++)
        choose_experts(s, logits + row * n, logits + batch * n, expert + row * k, weight + row * k);
    if (latent) project_normed(m.latent_in, x, {input, width, false});
    else
        for (int64_t row = 0; row < batch; row++) normalise(x.norm, x.input + row * model, input + row * model);

    // What experts read, with zeros up to the columns that are stored.
    const int64_t entering = stored_columns(m.experts_in), leaving = stored_columns(m.experts_out);
    float* gathered = scratch<DECODE_GATHERED>(pairs * (entering + leaving));
    float* active = gathered + pairs * entering;
    int64_t experts = 0, at = 0;
    for (int64_t e = 0; e < n; e++) {
        const int64_t first = at;
        for (int64_t pair = 0; pair < pairs; pair++)
            if (expert[pair] == e) {
                copy(input + pair / k * width, width, gathered + at * entering);
                clear(gathered + at * entering + width, entering - width);
                place[pair] = at++;
            }
        if (at > first) chosen[experts++] = {e, first, at - first};
    }

    float* hidden = scratch<DECODE_PROJECTED>(pairs * wide);
    auto enter = [&](int64_t begin, int64_t end) {
        for (int64_t q = begin / wide; q * wide < end; q++) {
            const int64_t first = begin > q * wide ? begin - q * wide : 0;
            multiply_experts(m.experts_in, wide, chosen[q], first, least(end - q * wide, wide), gathered, hidden);
        }
    };
    if (experts * wide * bytes_per_row(m.experts_in) < worth_a_thread()) enter(0, experts * wide);
    else parallel(experts * wide, enter);
    for (int64_t pair = 0; pair < pairs; pair++) {
        activate_hidden(s.mlp(), hidden + pair * wide, s.hidden, active + pair * leaving);
        clear(active + pair * leaving + s.hidden, leaving - s.hidden);
    }

    float* out = scratch<DECODE_INNER>(pairs * width);
    auto leave = [&](int64_t begin, int64_t end) {
        for (int64_t q = 0; q < experts; q++) multiply_experts(m.experts_out, width, chosen[q], begin, end, active, out);
        for (int64_t row = 0; row < batch; row++)
            for (int64_t i = begin; i < end; i++) {
                float total = 0.0f;
                for (int64_t pair = row * k; pair < (row + 1) * k; pair++)
                    total += weight[pair] * out[place[pair] * width + i];
                if (latent) input[row * width + i] = total;
                else x.onto.y[row * x.onto.stride + i] += x.onto.scale * total;
            }
    };
    if (experts * width * bytes_per_row(m.experts_out) < worth_a_thread()) leave(0, width);
    else parallel(width, leave);
    if (latent)
        project(m.latent_out, batch, x.onto, [&](int64_t row, float* to) { copy(input + row * width, width, to); });
}

}  // namespace MK_ISA
