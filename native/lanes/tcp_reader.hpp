// The body of a write frame on a tcp lane: the chunks themselves.
#pragma once

#include "lanes/leg_in.hpp"
#include "lanes/receiver_input.hpp"

namespace kvxfer {

// Takes the whole body (plan.n_pages chunks) off the socket. `placed`: every chunk lies in its page; it stays false
// where the leg was revoked on the way, and then the rest of the body went nowhere. Looks at live() again, under the
// leg's gate, before every piece of at most ReceiverInput::kBufferBytes.
ReceiverInput::Status read_tcp_body(ReceiverInput& input, LegIn& leg, const WritePlan& plan, bool& placed);

}  // namespace kvxfer
