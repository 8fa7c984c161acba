// Loops whose every step the compiler knows.
#pragma once

#include <utility>

namespace outrider {

// body(integral_constant) for COUNT numbers from FIRST on.
template <int FIRST, int COUNT, class Body>
[[gnu::always_inline]] inline void each_step(Body body) {
    [&]<int... I>(std::integer_sequence<int, I...>) {
        (body(std::integral_constant<int, FIRST + I>()), ...);
    }(std::make_integer_sequence<int, COUNT>());
}

}  // namespace outrider
