// The products, compiled once for all that multiplies.
#include "multiply.hpp"

#include "quantized_tiles.hpp"
#include "tiles.hpp"

namespace outrider {

template <class T>
void Multiplier<T>::make_digits(const Packed& part, const T* x, int stride, int first, int last,
                                int count, const Digits& to) {
    digitise(part, x, stride, first, last, count, to);
}

// Rows [first, last) of x as fp32.
template <class T>
static void widen(const T* x, int stride, int first, int last, float* to, int to_stride,
                  int inputs) {
    for (int r = first; r < last; ++r)
        for (int i = 0; i < inputs; i += LANES)
            store(to + std::size_t(r) * to_stride + i, load(x + std::size_t(r) * stride + i));
}

template <class T>
void Multiplier<T>::make_ready(const Weight<T>& weight, const Packed* part, const T* x, int stride,
                               int count, const Ready& to) {
    if (part)
        make_digits(*part, x, stride, 0, count, count, to.digits);
    else if (to.wide)
        widen(x, stride, 0, count, to.wide, wide_stride(weight), weight.plain.inputs);
}

template <class T>
void Multiplier<T>::multiply(const Weight<T>& weight, const Packed* part, int first, int last,
                             const T* x, int stride, const Ready& ready, int count,
                             const Epilogue& epilogue) {
    if (part) return product(*part, first, last, ready.digits, count, epilogue);
    if constexpr (WIDENS<T>)
        if (ready.wide)
            return product(weight.plain, first, last, ready.wide, wide_stride(weight), count,
                           epilogue);
    product(weight.plain, first, last, x, stride, count, epilogue);
}

template <class T>
void Multiplier<T>::multiply(Team& team, const Weight<T>& weight, const T* x, int stride, int count,
                             const Epilogue& epilogue, Prepare prepare) {
    // body(first, last) for few rows at a time, which are near then, after they have been prepared.
    auto each_rows = [&](int together, auto body) {
        team.share(tiles_of(count, together), 1, [&](int first, int last) {
            for (int row = first * together; first < last; ++first, row += together) {
                const int stop = std::min(row + together, count);
                if (prepare) prepare(row, stop);
                body(row, stop);
            }
        });
        prepare = nullptr;
    };
    if (widens(weight, count) && count > ALONE)
        each_rows(4, [&](int first, int last) {
            widen(x, stride, first, last, wide, wide_stride(weight), weight.plain.inputs);
        });
    const bool alone = count <= (weight.plain.empty() ? DIGITS_ALONE : ALONE);
    const Ready mine = alone ? own_room(team, weight, count) : room_at(0, weight, count);
    each_part(weight, epilogue, [&](const Packed* part, int units, const Epilogue& to) {
        if (part && !alone)
            each_rows(padded(4, digitised_together(*part, count, mine.digits.coarse)),
                      [&](int first, int last) {
                          make_digits(*part, x, stride, first, last, count, mine.digits);
                      });
        else if (prepare)
            each_rows(4, [](int, int) {});
        bool ready = !alone;
        team.share(units, grain(units, team.count, count), [&](int first, int last) {
            if (!ready) make_ready(weight, part, x, stride, count, mine);
            ready = true;
            multiply(weight, part, first, last, x, stride, mine, count, to);
        });
    });
}

template struct Multiplier<float>;
template struct Multiplier<bf16>;

}  // namespace outrider
