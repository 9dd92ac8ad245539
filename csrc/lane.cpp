#include "lane.hpp"

#include <chrono>

namespace tz {

std::int64_t steady_now() noexcept {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

void PieceQueue::push(Piece* piece) {
    const int which = piece->op == Op::read ? 0 : 1;
    piece->next = nullptr;
    if (tails_[which])
        tails_[which]->next = piece;
    else
        heads_[which] = piece;
    tails_[which] = piece;
}

void PieceQueue::push_chain(Piece* chain) {
    while (chain) {
        Piece* const rest = chain->next;
        push(chain);
        chain = rest;
    }
}

void PieceQueue::push_front(Piece* piece) {
    const int which = piece->op == Op::read ? 0 : 1;
    piece->next = heads_[which];
    heads_[which] = piece;
    if (!tails_[which]) tails_[which] = piece;
}

Piece* PieceQueue::take(int which) {
    Piece* const piece = heads_[which];
    heads_[which] = piece->next;
    if (!heads_[which]) tails_[which] = nullptr;
    piece->next = nullptr;
    return piece;
}

Piece* PieceQueue::pop() {
    if (empty()) return nullptr;
    if (!heads_[0] || (heads_[1] && overtakes_ >= kReadsAtOnce)) {
        overtakes_ = 0;
        return take(1);
    }
    if (heads_[1]) ++overtakes_;
    return take(0);
}

}  // namespace tz
