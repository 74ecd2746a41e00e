// Threads that stay for a whole call: its short loops follow one another without waking torch's pool for each.
#pragma once

#include <stdint.h>
#if defined(__unix__) || defined(__APPLE__)
#include <sched.h>
#endif

namespace MK_ISA {

// One thread leads and hands out loops, cut into shares. A thread takes the share of its own number, whose memory it had the
// last time too, then what others have not begun: the leader waits for none that is not at work.
struct Crew {
    typedef void (*Share)(int64_t share, void* context);
    static constexpr int64_t MOST = 32;

    const int64_t threads;
    explicit Crew(int64_t threads) : threads(threads < MOST ? threads : MOST) {}

    // In the leading thread, number 0: all shares of a loop, of which every one is run once.
    void run(int64_t shares, Share share, void* context) {
        // Nobody reads these now: all shares of the loop before are done.
        __atomic_store_n(&share_, share, __ATOMIC_RELAXED);
        __atomic_store_n(&context_, context, __ATOMIC_RELAXED);
        __atomic_store_n(&done_, 0, __ATOMIC_RELAXED);
        loop_ += LOOP;
        __atomic_store_n(&left_, loop_ + ((uint64_t(1) << shares) - 1), __ATOMIC_RELEASE);
        while (take_one(0)) {}
        wait([&] { return __atomic_load_n(&done_, __ATOMIC_ACQUIRE) == shares; });
    }
    // In the leading thread, after the last loop; in others, until then.
    void end() { __atomic_store_n(&left_, END, __ATOMIC_RELEASE); }
    void help(int64_t number) {
        bool ended = false;
        while (!ended) wait([&] { return take_one(number) || (ended = __atomic_load_n(&left_, __ATOMIC_ACQUIRE) == END); });
    }

    // The crew that this thread leads, or null.
    static Crew*& led() {
        static thread_local Crew* crew = nullptr;
        return crew;
    }

private:
    // The loop's number, above a bit for each of its shares that nobody has taken.
    static constexpr uint64_t LOOP = uint64_t(1) << MOST, END = ~uint64_t(0);

    bool take_one(int64_t number) {
        uint64_t left = __atomic_load_n(&left_, __ATOMIC_ACQUIRE);
        if (left == END || left % LOOP == 0) return false;
        const Share share = __atomic_load_n(&share_, __ATOMIC_RELAXED);
        void* context = __atomic_load_n(&context_, __ATOMIC_RELAXED);
        const int64_t own = left >> number & 1 ? number : __builtin_ctzll(left);
        // While a share is left, so is its loop: what was just read belongs to it.
        if (!__atomic_compare_exchange_n(
                &left_, &left, left & ~(uint64_t(1) << own), false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED))
            return true;
        share(own, context);
        __atomic_add_fetch(&done_, 1, __ATOMIC_RELEASE);
        return true;
    }

    // Others may need the processor, if this takes longer than a loop should.
    template <class Ready>
    static void wait(const Ready& ready) {
        for (int64_t tries = 0; !ready(); tries++) {
#if defined(__x86_64__)
            __builtin_ia32_pause();
#elif defined(__aarch64__)
            __asm__ volatile("yield");
#endif
#if defined(__unix__) || defined(__APPLE__)
            if (tries > 4096) sched_yield();
#endif
        }
    }

    alignas(64) uint64_t left_ = 0;
    Share share_ = nullptr;
    void* context_ = nullptr;
    alignas(64) int64_t done_ = 0;
    uint64_t loop_ = 0;  // the leader's
};

}  // namespace MK_ISA
