// Rows of a head that drafts come from alone: copies of those of likely ids.
#include "model.hpp"
#include "with.hpp"

namespace outrider {
namespace {

// Makes room for the likely rows of a model, none of which has an id yet.
template <class T>
void make_room(Weights<T>& m, int size) {
    if (m.head->packed.empty()) {
        Matrix<T>&to = m.likely.plain, &from = m.head->plain;
        to.units = padded(size, LANES) / LANES;
        to.inputs = from.inputs;
        to.data = Memory<T>::of_weights(to.units * to.unit_size());
        if (from.bias.size()) to.bias = Memory<float>(std::size_t(to.units) * LANES);
    } else {
        m.likely.packed.push_back(empty_like(m.head->packed[0], size));
    }
    m.likely_ids.assign(size, -1);
}

}  // namespace

const char* outrider_likely(Model* model, int size, const std::int32_t* places,
                            const std::int32_t* ids, int count) {
    return with(model, [&](auto& m) -> const char* {
        if (!m.head || m.head->empty()) return INCOMPLETE;
        if (m.head->packed.size() > 1 || !m.targets.empty())
            return "a head in parts, or of ids of its own, has no likely rows";
        if (size < 1 || size >= m.c.vocabulary || count < 0)
            return "the likely rows are none, or are no fewer than all";
        if (!m.likely_ids.empty() && int(m.likely_ids.size()) != size)
            return "the likely rows stay as many as they are";
        for (int i = 0; i < count; ++i)
            if (places[i] < 0 || places[i] >= size || ids[i] < 0 || ids[i] >= m.c.vocabulary)
                return "there is no such row";
        Turn turn;  // no forward reads them
        if (m.likely_ids.empty()) make_room(m, size);
        for (int i = 0; i < count; ++i) {
            if (m.head->packed.empty())
                copy_row(m.likely.plain, places[i], m.head->plain, ids[i]);
            else
                copy_row(m.likely.packed[0], places[i], m.head->packed[0], ids[i]);
            m.likely_ids[places[i]] = ids[i];
        }
        return nullptr;
    });
}

}  // namespace outrider
