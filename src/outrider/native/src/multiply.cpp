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

template <class T>
void Multiplier<T>::multiply(const Weight<T>& weight, const Packed* part, int first, int last,
                             const T* x, int stride, const Digits& digits, int count,
                             const Epilogue& epilogue) {
    if (part)
        product(*part, first, last, digits, count, epilogue);
    else
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
    if constexpr (WIDENS<T>) {
        const Matrix<T>& plain = weight.plain;
        if (!plain.empty() && count > ALONE) {
            const int wide_stride = spread_stride(plain.inputs);
            each_rows(4, [&](int first, int last) {
                for (int r = first; r < last; ++r)
                    for (int i = 0; i < plain.inputs; i += LANES)
                        store(wide + std::size_t(r) * wide_stride + i,
                              load(x + std::size_t(r) * stride + i));
            });
            team.share(plain.units, grain(plain.units, team.count, count),
                       [&](int first, int last) {
                           product_of_many(plain, first, last, wide, wide_stride, count, epilogue);
                       });
            return;
        }
    }
    const bool alone = count <= DIGITS_ALONE;
    const Digits mine = alone ? own_digits(team) : digits;
    each_part(weight, epilogue, [&](const Packed* part, int units, const Epilogue& to) {
        if (part && !alone)
            each_rows(padded(4, digitised_together(*part, count, mine.coarse)),
                      [&](int first, int last) {
                          make_digits(*part, x, stride, first, last, count, mine);
                      });
        else if (prepare)
            each_rows(4, [](int, int) {});
        bool ready = !part || !alone;
        team.share(units, grain(units, team.count, count), [&](int first, int last) {
            if (!ready) make_digits(*part, x, stride, 0, count, count, mine);
            ready = true;
            multiply(weight, part, first, last, x, stride, mine, count, to);
        });
    });
}

template struct Multiplier<float>;
template struct Multiplier<bf16>;

}  // namespace outrider
