// Products with a weight matrix in every format: what the stored bytes mean, by plain loops.
#pragma once

#include "harness.h"

namespace agreement {

static float from_bfloat16(uint16_t half) {
    const uint32_t bits = (uint32_t)half << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
// To the nearest, halves to even.
static uint16_t to_bfloat16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// A matrix, the memory it points to, and its weights as numbers.
struct Stored {
    Matrix matrix;
    std::vector<uint8_t> bytes;
    std::vector<uint16_t> halves;
    Floats floats, scales, bias;
    Doubles exact;
};

static Stored draw_matrix(Draw& draw, int64_t format, int64_t rows, int64_t columns, bool with_bias) {
    const double levels[16] = {-1.0,         -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343,
                               -0.091050036, 0.0,        0.0795803,   0.1609302,  0.2461123,   0.33791524,
                               0.44070983,   0.562617,   0.72295684,  1.0};
    Stored made;
    made.exact.resize(rows * columns);
    Matrix m = {};
    m.format = format, m.rows = rows, m.columns = columns;
    if (format == FLOAT32) {
        made.floats = draw.floats(rows * columns, 0.3), made.exact = wide(made.floats), m.weight = made.floats.data();
    } else if (format == BFLOAT16 || format == BFLOAT16_NARROW) {
        for (int64_t i = 0; i < rows * columns; i++) {
            made.halves.push_back(to_bfloat16((float)draw.normal()));
            made.exact[i] = from_bfloat16(made.halves[i]);
        }
        m.weight = made.halves.data();
    } else if (format == INT8 || format == INT8_NARROW) {
        made.scales = draw.floats(rows, 0.003, 0.01);
        for (int64_t i = 0; i < rows * columns; i++) {
            const int8_t code = (int8_t)draw.whole(-127, 127);
            made.bytes.push_back((uint8_t)code), made.exact[i] = (double)made.scales[i / columns] * code;
        }
        m.weight = made.bytes.data(), m.scales = made.scales.data();
    } else {
        // 32 inputs, or more, share a scale; a byte holds one of the first half of them and one of the second.
        m.group = format == NF4 ? 32 * draw.whole(1, 2) : 32;
        const int64_t groups = (columns + m.group - 1) / m.group, half = m.group / 2;
        const int64_t codes = format == NF4 ? groups * half : (columns + 63) / 64 * 32,
                      pitch = format == NF4 ? codes : codes / 16 * 17;
        made.bytes.resize(rows * pitch);
        for (uint8_t& byte : made.bytes) byte = (uint8_t)draw.next();
        if (format == NF4)
            for (int64_t i = 0; i < rows * groups; i++) made.halves.push_back(to_bfloat16((float)(0.2 + draw.unit())));
        else
            made.scales = draw.floats(rows, 0.003, 0.01);
        for (int64_t i = 0; i < rows * columns; i++) {
            const int64_t row = i / columns, group = i % columns / m.group, within = i % columns % m.group;
            const uint8_t* own = made.bytes.data() + row * pitch;
            const int code = own[group * half + within % half] >> (within < half ? 0 : 4) & 15;
            if (format == NF4)
                made.exact[i] = from_bfloat16(made.halves[row * groups + group]) * levels[code];
            else
                made.exact[i] = (double)made.scales[row] * round(round(127 * levels[code]) * own[codes + group] / 255);
        }
        m.weight = made.bytes.data();
        m.scales = format == NF4 ? (const void*)made.halves.data() : made.scales.data();
    }
    if (with_bias) made.bias = draw.floats(rows), m.bias = made.bias.data();
    made.matrix = m;
    return made;
}

// x as the product reads it: the NARROW formats round it.
static Doubles rounded_row(int64_t format, const float* x, int64_t n) {
    Doubles y = wide(x, n);
    float most = 0;
    for (int64_t i = 0; i < n; i++) most = fabsf(x[i]) > most ? fabsf(x[i]) : most;
    for (int64_t i = 0; i < n; i++) {
        if (format == BFLOAT16_NARROW) y[i] = from_bfloat16(to_bfloat16(x[i]));
        if (format == INT8_NARROW || format == INT4_NARROW)
            y[i] = nearbyintf(x[i] * (127.0f / most)) * (double)(most / 127.0f);
    }
    return y;
}

static Doubles product(const Stored& by, const Doubles& x) {
    Doubles y(by.matrix.rows);
    for (int64_t row = 0; row < by.matrix.rows; row++) {
        y[row] = by.bias.empty() ? 0 : by.bias[row];
        for (int64_t i = 0; i < by.matrix.columns; i++) y[row] += by.exact[row * by.matrix.columns + i] * x[i];
    }
    return y;
}

static void check_products(Draw& draw) {
    const char* names[] = {"float32", "bfloat16", "int8", "nf4", "bfloat16 x bfloat16", "int8 x int8", "int4 x int8"};
    for (int64_t format = FLOAT32; format <= INT4_NARROW; format++) {
        const int64_t rows = draw.whole(1, 40), columns = draw.whole(1, 200);
        // Those of a step, or of a prompt, which narrow formats take another way.
        const int64_t batch = draw.chance(0.25) ? draw.whole(20, 140) : draw.whole(1, 20);
        const Stored by = draw_matrix(draw, format, rows, columns, draw.chance(0.5));
        Floats x = draw.floats(batch * columns), y(batch * rows);
        Matvec call = {};
        call.matrix = by.matrix, call.batch = batch, call.x = x.data(), call.y = y.data();
        run("matvec", call);
        // Relative to what is added up, which may cancel.
        Stored sizes = by;
        for (double& one : sizes.exact) one = fabs(one);
        for (float& one : sizes.bias) one = fabsf(one);
        for (int64_t row = 0; row < batch; row++) {
            Doubles own = rounded_row(format, x.data() + row * columns, columns);
            const Doubles want = product(by, own);
            for (double& one : own) one = fabs(one);
            const Doubles size = product(sizes, own);
            for (int64_t i = 0; i < rows; i++)
                judge(names[format], fabs(y[row * rows + i] - want[i]) / (size[i] + 1e-6), 2e-6);
        }
    }
}

}  // namespace agreement
