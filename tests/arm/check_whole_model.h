// A whole model's step: embedding, parts of every kind behind their norms, head; token after token.
#pragma once

#include <memory>

#include "check_products.h"
#include "check_steps.h"

namespace agreement {

struct DrawnNorm {
    Norm norm;
    Floats weight, bias;

    Doubles of(const Doubles& x) const {
        Doubles y = x;
        double mean = 0;
        for (double one : x) mean += one / x.size();
        for (double& one : y) one -= norm.centred ? mean : 0;
        y = rms_normed(y.data(), y.size(), norm.eps, weight.data());
        for (size_t i = 0; i < y.size(); i++) y[i] = (y[i] + (bias.empty() ? 0 : bias[i])) * norm.scale;
        return y;
    }
};

static void draw_norm(Draw& draw, int64_t width, DrawnNorm& made) {
    made.weight = draw.floats(width);
    if (draw.chance(0.3)) made.bias = draw.floats(width);
    made.norm = {};
    made.norm.weight = made.weight.data(), made.norm.bias = data_or_null(made.bias), made.norm.width = width;
    made.norm.centred = draw.chance(0.3), made.norm.eps = 1e-5, made.norm.scale = draw.chance(0.5) ? 1.0f : 0.7f;
}

// A format whose product does not round x: what is rounded may be one step away from where double puts it.
static Stored draw_projection(Draw& draw, int64_t rows, int64_t columns) {
    return draw_matrix(draw, draw.whole(FLOAT32, NF4), rows, columns, draw.chance(0.3));
}

// A block behind its norm: the struct for the kernel, and the same row by row in double.
struct DrawnPart {
    DrawnNorm norm;
    Kept kept;
    int64_t kind = 0, batch = 0;
    DecodePart part = {};
    std::vector<std::unique_ptr<Stored>> matrices;
    std::vector<Floats> carried;  // [batch] of each
    std::vector<Doubles> exact;   // the same

    virtual ~DrawnPart() {}
    virtual Doubles token(int64_t row, const Doubles& x) = 0;
    virtual const void* block() = 0;

    Stored* matrix(Draw& draw, int64_t rows, int64_t columns) {
        matrices.push_back(std::make_unique<Stored>(draw_projection(draw, rows, columns)));
        return matrices.back().get();
    }
    float* carry(Floats x) {
        exact.push_back(wide(x));
        carried.push_back(std::move(x));
        return carried.back().data();
    }
    double* of_row(size_t which, int64_t row) { return exact[which].data() + row * (exact[which].size() / batch); }
};

struct DrawnMamba1 : DrawnPart {
    Mamba1Part m = {};
    DrawnMamba1(Draw& draw, int64_t width, int64_t rows) {
        kind = 1, batch = rows;
        Mamba1Step& s = m.step = draw_mamba1(draw, kept);
        const int64_t rank = draw.whole(1, 6), i = s.channels;
        if (draw.chance(0.5)) {
            Floats a(i * s.r);
            for (int64_t q = 0; q < i * s.r; q++) a[q] = (float)-exp((double)s.A_log[q]);
            s.A = kept.keep(a);
        }
        m.in_proj = matrix(draw, 2 * i, width)->matrix, m.x_proj = matrix(draw, rank + 2 * s.r, i)->matrix;
        matrices.push_back(std::make_unique<Stored>(draw_matrix(draw, FLOAT32, i, rank, true)));
        m.dt_proj = matrices.back()->matrix, m.out_proj = matrix(draw, width, i)->matrix;
        m.dt_b_c_norm = draw.chance(0.5), m.norm_eps = 1e-5f;
        if (draw.chance(0.5))
            m.dt_norm = kept.keep(draw.floats(rank)), m.B_norm = kept.keep(draw.floats(s.r)),
            m.C_norm = kept.keep(draw.floats(s.r));
        m.window = carry(draw.floats(batch * i * s.k)), m.state = carry(draw.floats(batch * i * s.r));
    }
    const void* block() override { return &m; }
    Doubles token(int64_t row, const Doubles& x) override {
        const Mamba1Step& s = m.step;
        const int64_t rank = m.dt_proj.columns;
        const Doubles projected = product(*matrices[0], x);
        const Doubles inner = convolved(s.channels, s.k, s.conv_weight, s.conv_bias, projected.data(), of_row(0, row));
        const Doubles small = product(*matrices[1], inner);
        auto part = [&](int64_t at, int64_t n, const float* weight) {
            return m.dt_b_c_norm ? rms_normed(small.data() + at, n, m.norm_eps, weight)
                                 : Doubles(small.begin() + at, small.begin() + at + n);
        };
        const Doubles dt = product(*matrices[2], part(0, rank, m.dt_norm)), B = part(rank, s.r, m.B_norm),
                      C = part(rank + s.r, s.r, m.C_norm);
        return product(*matrices[3],
                       mamba1_scan(s, projected.data(), inner.data(), dt.data(), B.data(), C.data(), of_row(1, row)));
    }
};

struct DrawnMamba2 : DrawnPart {
    Mamba2Part m = {};
    DrawnMamba2(Draw& draw, int64_t width, int64_t rows) {
        kind = 2, batch = rows;
        const Mamba2Step& s = m.step = draw_mamba2(draw, kept);
        m.in_proj = matrix(draw, s.projected(), width)->matrix,
        m.out_proj = matrix(draw, width, s.mlp + s.width())->matrix;
        m.z_scale = m.x_scale = m.B_scale = m.dt_scale = 1, m.C_scale = 0.6f;
        m.window = carry(draw.floats(batch * s.conv_dim() * s.k)),
        m.state = carry(draw.floats(batch * s.width() * s.r));
    }
    const void* block() override { return &m; }
    Doubles token(int64_t row, const Doubles& x) override {
        const Mamba2Step& s = m.step;
        Doubles projected = product(*matrices[0], x);
        const int64_t c = s.xbc() + s.width() + s.groups * s.r;
        for (int64_t i = c; i < s.dt(); i++) projected[i] *= m.C_scale;
        return product(*matrices[1], mamba2_token(s, projected.data(), of_row(0, row), of_row(1, row)));
    }
};

struct DrawnMamba3 : DrawnPart {
    Mamba3Part m = {};
    DrawnMamba3(Draw& draw, int64_t width, int64_t rows) {
        kind = 3, batch = rows;
        const Mamba3Step& s = m.step = draw_mamba3(draw, kept);
        m.in_proj = matrix(draw, s.projected(), width)->matrix, m.out_proj = matrix(draw, width, s.width())->matrix;
        m.state = carry(draw.floats(batch * s.width() * s.r)),
        m.k_state = carry(draw.floats(batch * s.ranks * s.heads * s.r));
        m.v_state = carry(draw.floats(batch * s.width())), m.angle = carry(unturned(s, batch));
    }
    const void* block() override { return &m; }
    Doubles token(int64_t row, const Doubles& x) override {
        Carried3 own;
        Doubles* parts[4] = {&own.state, &own.k, &own.v, &own.angle};
        for (int i = 0; i < 4; i++) parts[i]->assign(of_row(i, row), of_row(i, row) + exact[i].size() / batch);
        const Doubles y = mamba3_token(m.step, product(*matrices[0], x).data(), own);
        for (int i = 0; i < 4; i++) memcpy(of_row(i, row), parts[i]->data(), parts[i]->size() * sizeof(double));
        return product(*matrices[1], y);
    }
};

static double activate(int64_t which, double x) {
    if (which == SILU) return silu(x);
    if (which == GELU) return x * (1 + erf(x / sqrt(2))) / 2;
    if (which == GELU_TANH) return x * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x))) / 2;
    return x < 0 ? 0 : which == RELU2 ? x * x : x;
}
static Doubles activated_hidden(const MlpStep& s, const Doubles& hidden, int64_t n) {
    Doubles y(n);
    for (int64_t i = 0; i < n; i++)
        y[i] = s.gated ? hidden[i] * activate(s.activation, s.gate_scale * hidden[n + i])
                       : activate(s.activation, hidden[i]);
    return y;
}

struct DrawnMlp : DrawnPart {
    MlpPart m = {};
    DrawnMlp(Draw& draw, int64_t width, int64_t rows) {
        kind = 4, batch = rows;
        const int64_t inner = draw.whole(1, 50);
        m.step.activation = draw.whole(SILU, RELU2), m.step.gated = draw.chance(0.6), m.step.gate_scale = 0.8f;
        m.fc1 = matrix(draw, inner * (m.step.gated ? 2 : 1), width)->matrix, m.fc2 = matrix(draw, width, inner)->matrix;
    }
    const void* block() override { return &m; }
    Doubles token(int64_t, const Doubles& x) override {
        return product(*matrices[1], activated_hidden(m.step, product(*matrices[0], x), m.fc2.columns));
    }
};

struct DrawnAttention : DrawnPart {
    AttentionPart m = {};
    std::vector<int64_t> first, position;
    Doubles rates;
    std::vector<std::vector<Doubles>> keys, values;  // [row][token]
    DrawnAttention(Draw& draw, int64_t width, int64_t rows, int64_t tokens)
        : first(rows, 0), position(rows, 0), keys(rows), values(rows) {
        kind = 5, batch = rows;
        AttentionStep& s = m.step;
        s.kv_heads = draw.whole(1, 2), s.heads = s.kv_heads * draw.whole(1, 7), s.p = draw.whole(1, 20), s.scale = 0.4f;
        s.window = draw.chance(0.4) ? 2 : 0, s.angles = draw.whole(0, s.p / 2);
        for (int64_t i = 0; i < s.angles; i++) rates.push_back(draw.unit());
        s.rates = rates.data();
        m.in_proj = matrix(draw, s.projected(), width)->matrix, m.out_proj = matrix(draw, width, s.heads * s.p)->matrix;
        m.slots = tokens, m.first = first.data(), m.position = position.data();
        m.k = carry(Floats(rows * tokens * s.kv_heads * s.p)), m.v = carry(Floats(rows * tokens * s.kv_heads * s.p));
    }
    const void* block() override { return &m; }
    void turn_by(int64_t place, double* x) const {
        for (int64_t i = 0; i < m.step.angles; i++) {
            const double one = x[i], other = x[m.step.angles + i], angle = place * rates[i];
            x[i] = one * cos(angle) - other * sin(angle), x[m.step.angles + i] = other * cos(angle) + one * sin(angle);
        }
    }
    Doubles token(int64_t row, const Doubles& x) override {
        const AttentionStep& s = m.step;
        const int64_t p = s.p, place = keys[row].size();
        Doubles projected = product(*matrices[0], x), mixed(s.heads * p, 0);
        for (int64_t head = 0; head < s.heads + s.kv_heads; head++) turn_by(place, projected.data() + head * p);
        const auto key = projected.begin() + s.heads * p, value = key + s.kv_heads * p;
        keys[row].emplace_back(key, value), values[row].emplace_back(value, projected.end());
        for (int64_t head = 0; head < s.heads; head++) {
            const int64_t kv = head / (s.heads / s.kv_heads) * p;
            const int64_t first = s.window && place + 1 > s.window ? place + 1 - s.window : 0;
            Doubles scores(place + 1 - first, 0);
            double total = 0, most = -INFINITY;
            for (int64_t t = first; t <= place; t++) {
                double& score = scores[t - first];
                for (int64_t i = 0; i < p; i++) score += s.scale * projected[head * p + i] * keys[row][t][kv + i];
                most = score > most ? score : most;
            }
            for (int64_t t = first; t <= place; t++) {
                const double weight = exp(scores[t - first] - most);
                total += weight;
                for (int64_t i = 0; i < p; i++) mixed[head * p + i] += weight * values[row][t][kv + i];
            }
            for (int64_t i = 0; i < p; i++) mixed[head * p + i] /= total;
        }
        return product(*matrices[1], mixed);
    }
};

struct DrawnMoe : DrawnPart {
    MoePart m = {};
    DrawnMoe(Draw& draw, int64_t width, int64_t rows) {
        kind = 6, batch = rows;
        MoeStep& s = m.step;
        s.rule = draw.whole(SOFTMAX, SIGMOID), s.groups = s.rule == SIGMOID ? draw.whole(1, 3) : 1,
        s.top_groups = draw.whole(1, s.groups);
        const int64_t each = draw.whole(1, 4);
        s.experts = s.groups * each, s.top_k = draw.whole(1, s.top_groups * each), s.hidden = draw.whole(1, 20);
        s.activation = draw.whole(SILU, RELU2), s.gated = draw.chance(0.5), s.normalize = draw.chance(0.5),
        s.weight_scale = 1.3f;
        s.correction_bias = kept.keep(draw.floats(s.experts, 0.2));
        const bool latent = draw.chance(0.5);
        const int64_t inner = latent ? draw.whole(1, 20) : width;
        auto bare = [&](int64_t n, int64_t columns) {
            matrices.push_back(
                std::make_unique<Stored>(draw_matrix(draw, draw.whole(FLOAT32, INT8), n, columns, false)));
            return matrices.back()->matrix;
        };
        m.router = bare(s.experts, width), m.experts_in = bare(s.experts * s.wide(), inner),
        m.experts_out = bare(s.experts * inner, s.hidden);
        if (latent) m.latent_in = bare(inner, width), m.latent_out = bare(width, inner);
    }
    const void* block() override { return &m; }

    // The `count` largest of x among those that are allowed.
    static std::vector<int64_t> best(const Doubles& x, int64_t count, const std::vector<bool>& allowed) {
        std::vector<int64_t> found;
        std::vector<bool> left = allowed;
        for (; count > 0; count--) {
            int64_t most = -1;
            for (size_t i = 0; i < x.size(); i++)
                if (left[i] && (most < 0 || x[i] > x[most])) most = (int64_t)i;
            left[most] = false;
            found.push_back(most);
        }
        return found;
    }
    Doubles token(int64_t, const Doubles& x) override {
        const MoeStep& s = m.step;
        const int64_t each = s.experts / s.groups, width = m.experts_in.columns;
        Doubles score = product(*matrices[0], x), liking = score;
        double total = 0, chosen = 0, most = -INFINITY;
        for (double one : score) most = one > most ? one : most;
        for (int64_t e = 0; e < s.experts; e++) {
            score[e] = s.rule == SIGMOID ? sigmoid(score[e]) : exp(score[e] - most);
            if (s.rule == SIGMOID) liking[e] = score[e] + s.correction_bias[e];
            total += score[e];
        }
        std::vector<bool> allowed(s.experts, true);
        if (s.top_groups < s.groups) {
            Doubles sums(s.groups, 0);
            for (int64_t g = 0; g < s.groups; g++) {
                std::vector<bool> own(s.experts, false);
                for (int64_t i = 0; i < each; i++) own[g * each + i] = true;
                for (int64_t e : best(liking, each < 2 ? each : 2, own)) sums[g] += liking[e];
            }
            allowed.assign(s.experts, false);
            for (int64_t g : best(sums, s.top_groups, std::vector<bool>(s.groups, true)))
                for (int64_t i = 0; i < each; i++) allowed[g * each + i] = true;
        }
        const std::vector<int64_t> experts = best(liking, s.top_k, allowed);
        for (int64_t e : experts) chosen += score[e];
        double by = s.rule == SIGMOID ? 1 : total;
        if (s.normalize || s.rule == SOFTMAX_CHOSEN) by = chosen;
        const Doubles input = m.latent_in.rows ? product(*matrices[3], x) : x, first = matrices[1]->exact,
                      second = matrices[2]->exact;
        Doubles y(width, 0);
        for (int64_t e : experts) {
            Doubles hidden(s.wide(), 0);
            for (int64_t n = 0; n < s.wide(); n++)
                for (int64_t i = 0; i < width; i++) hidden[n] += first[(e * s.wide() + n) * width + i] * input[i];
            const Doubles active = activated_hidden(s.mlp(), hidden, s.hidden);
            for (int64_t n = 0; n < width; n++)
                for (int64_t i = 0; i < s.hidden; i++)
                    y[n] += s.weight_scale * score[e] / by * second[(e * width + n) * s.hidden + i] * active[i];
        }
        return m.latent_out.rows ? product(*matrices[4], y) : y;
    }
};

static void check_model(Draw& draw) {
    const int64_t width = draw.whole(1, 40), batch = draw.whole(1, 5), vocabulary = draw.whole(2, 30), tokens = 3,
                  count = draw.whole(1, 4);
    std::vector<std::unique_ptr<DrawnPart>> drawn;
    std::vector<DecodePart> parts;
    for (int64_t q = 0; q < count; q++) {
        const int64_t kind = draw.whole(1, 6);
        if (kind == 1) drawn.push_back(std::make_unique<DrawnMamba1>(draw, width, batch));
        if (kind == 2) drawn.push_back(std::make_unique<DrawnMamba2>(draw, width, batch));
        if (kind == 3) drawn.push_back(std::make_unique<DrawnMamba3>(draw, width, batch));
        if (kind == 4) drawn.push_back(std::make_unique<DrawnMlp>(draw, width, batch));
        if (kind == 5) drawn.push_back(std::make_unique<DrawnAttention>(draw, width, batch, tokens));
        if (kind == 6) drawn.push_back(std::make_unique<DrawnMoe>(draw, width, batch));
        DrawnPart& own = *drawn.back();
        draw_norm(draw, width, own.norm);
        own.part.kind = kind, own.part.block = own.block(), own.part.norm = own.norm.norm;
        own.part.scale = draw.chance(0.5) ? 1.0f : 0.8f, own.part.beside = q && draw.chance(0.3);
        parts.push_back(own.part);
    }
    DrawnNorm last;
    draw_norm(draw, width, last);
    const Stored embedding = draw_matrix(draw, draw.whole(FLOAT32, INT4_NARROW), vocabulary, width, false),
                 head = draw_projection(draw, vocabulary, width);
    DecodeModel model = {};
    model.width = width, model.parts = count, model.embedding = embedding.matrix, model.part = parts.data();
    model.norm_f = last.norm, model.head = head.matrix, model.embedding_scale = 1.5f, model.logits_scale = 0.9f;
    std::vector<int64_t> ids(batch);
    Floats logits(batch * vocabulary);
    Decode call = {};
    call.model = &model, call.batch = batch, call.ids = ids.data(), call.logits = logits.data(), call.stays = true;
    for (int64_t t = 0; t < tokens; t++) {
        for (int64_t& id : ids) id = draw.whole(0, vocabulary - 1);
        run("decode", call);
        for (int64_t row = 0; row < batch; row++) {
            Doubles residual(width), input;
            for (int64_t i = 0; i < width; i++)
                residual[i] = model.embedding_scale * embedding.exact[ids[row] * width + i];
            for (auto& own : drawn) {
                if (!own->part.beside) input = residual;
                const Doubles y = own->token(row, own->norm.of(input));
                for (int64_t i = 0; i < width; i++) residual[i] += own->part.scale * y[i];
            }
            Doubles want = product(head, last.of(residual));
            for (double& one : want) one *= model.logits_scale;
            compare("logits", logits.data() + row * vocabulary, want, 5e-4);
        }
    }
}

}  // namespace agreement
