// Random inputs, the library's kernels by name, and comparisons with plain loops in double.
#pragma once

#include <dlfcn.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <functional>
#include <string>
#include <thread>
#include <vector>

namespace agreement {
using namespace shapes;

typedef std::vector<float> Floats;
typedef std::vector<double> Doubles;

// Of splitmix64: the same on every machine.
struct Draw {
    uint64_t state;

    uint64_t next() {
        uint64_t z = state += 0x9e3779b97f4a7c15;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
        z = (z ^ z >> 27) * 0x94d049bb133111eb;
        return z ^ z >> 31;
    }
    double unit() { return (next() >> 11) * 0x1p-53; }
    bool chance(double p) { return unit() < p; }
    int64_t whole(int64_t low, int64_t high) { return low + (int64_t)(next() % (uint64_t)(high - low + 1)); }
    // About normal.
    double normal() {
        double sum = -6;
        for (int i = 0; i < 12; i++) sum += unit();
        return sum;
    }
    Floats floats(int64_t n, double scale = 1, double mean = 0) {
        Floats x(n);
        for (float& one : x) one = (float)(mean + scale * normal());
        return x;
    }
    // Numbers of segments along each of `rows`.
    std::vector<int64_t> segments(int64_t rows, int64_t length) {
        std::vector<int64_t> ids(rows * length);
        for (int64_t i = 0; i < rows * length; i++) ids[i] = i % length ? ids[i - 1] + chance(0.2) : 0;
        return ids;
    }
};

inline Doubles wide(const Floats& x) { return Doubles(x.begin(), x.end()); }
inline Doubles wide(const float* x, int64_t n) { return Doubles(x, x + n); }
inline float* data_or_null(Floats& x) { return x.empty() ? nullptr : x.data(); }

// What is tested now.
struct Now {
    void* library;
    std::string isa, what;
    int64_t compared = 0, wrong = 0;
};
inline Now now;

inline void* find(const std::string& name) {
    void* found = dlsym(now.library, name.c_str());
    if (!found) {
        fprintf(stderr, "the library has no %s\n", name.c_str());
        exit(2);
    }
    return found;
}

template <class Call>
void run(const char* kernel, const Call& call) {
    auto function = (int32_t (*)(const Call*))find(std::string("mk_") + kernel + "_" + now.isa);
    const int32_t status = function(&call);
    if (!status) return;
    printf("%s, %s: status %d\n", now.isa.c_str(), kernel, status);
    now.wrong++;
}

inline void judge(const char* name, double error, double limit) {
    now.compared++;
    if (error <= limit) return;
    printf("%s, %s, %s: error %.3g, at most %.3g is allowed\n", now.isa.c_str(), now.what.c_str(), name, error, limit);
    now.wrong++;
}

// The largest difference, relative to the largest number.
inline void compare(const char* name, const float* got, const Doubles& want, double limit) {
    double largest = 1e-3, error = 0;
    for (double x : want) largest = fabs(x) > largest ? fabs(x) : largest;
    for (size_t i = 0; i < want.size(); i++) {
        const double off = fabs(got[i] - want[i]);
        error = off <= error ? error : off;  // NaN stays
    }
    judge(name, error / largest, limit);
}

// Gradients against differences of the loss that the plain loops have: along random directions, each input by itself.
struct Gradient {
    const char* name;
    Doubles* input;  // what the loss reads
    Floats found;
};
inline void compare_gradients(Draw& draw, const std::vector<Gradient>& all, const std::function<double()>& loss) {
    const double h = 1e-5;
    for (const Gradient& one : all) {
        if (one.input->empty()) continue;
        for (int repeat = 0; repeat < 2; repeat++) {
            const Doubles kept = *one.input;
            // All entries, then a few: one that is wrong does not hide among many.
            const double share = repeat ? 3.0 / kept.size() : 1;
            Doubles way(kept.size());
            double slope = 0, squares = 0, largest = 0;
            for (size_t i = 0; i < way.size(); i++) {
                way[i] = draw.chance(share) ? draw.normal() : 0;
                slope += way[i] * one.found[i];
                squares += way[i] * way[i];
                largest = fabs(one.found[i]) > largest ? fabs(one.found[i]) : largest;
            }
            double ends[2];
            for (int side = 0; side < 2; side++) {
                for (size_t i = 0; i < way.size(); i++) (*one.input)[i] = kept[i] + (side ? h : -h) * way[i];
                ends[side] = loss();
            }
            *one.input = kept;
            judge(one.name, fabs((ends[1] - ends[0]) / (2 * h) - slope) / (largest * sqrt(squares) + 1e-2), 1e-4);
        }
    }
}

inline double sigmoid(double x) { return 1 / (1 + exp(-x)); }
inline double silu(double x) { return x * sigmoid(x); }
inline double softplus(double x) { return x > 30 ? x : log1p(exp(x)); }
inline double clamped(double x, double low, double high) { return x < low ? low : x > high ? high : x; }
inline double dot(const Doubles& x, const Floats& y) {
    double sum = 0;
    for (size_t i = 0; i < x.size(); i++) sum += x[i] * y[i];
    return sum;
}
// x / sqrt(mean(x^2) + eps) of n entries, times the weight where there is one.
template <class Weight>
Doubles rms_normed(const double* x, int64_t n, double eps, const Weight* weight) {
    double squares = 0;
    for (int64_t i = 0; i < n; i++) squares += x[i] * x[i];
    Doubles y(n);
    for (int64_t i = 0; i < n; i++) y[i] = x[i] / sqrt(squares / n + eps) * (weight ? weight[i] : 1.0);
    return y;
}

}  // namespace agreement
