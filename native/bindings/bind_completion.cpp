#include "bindings/bindings.hpp"
#include "core/completion_queue.hpp"

using kvxfer::Completion;
using kvxfer::CompletionQueue;
using kvxfer::Kind;

void bind_completion(nb::module_& m) {
  m.attr("LANE_UP") = static_cast<int>(Kind::kLaneUp);
  m.attr("LANE_DOWN") = static_cast<int>(Kind::kLaneDown);
  m.attr("RECORD") = static_cast<int>(Kind::kRecord);
  m.attr("VIOLATION") = static_cast<int>(Kind::kViolation);
  m.attr("LEG_DRAINED") = static_cast<int>(Kind::kLegDrained);
  m.attr("LEG_FAILED") = static_cast<int>(Kind::kLegFailed);

  nb::class_<CompletionQueue>(m, "CompletionQueue",
                              "Unbounded in events per reservation and lane (which are few), one eventfd.")
      .def(nb::init<>())
      .def("fileno", &CompletionQueue::fileno, "The eventfd: readable while events are pending.")
      .def(
          "poll",
          [](CompletionQueue& self) {
            std::vector<Completion> taken;
            {
              nb::gil_scoped_release release;
              taken = self.drain();
            }
            nb::list events;
            for (const Completion& c : taken) {
              events.append(nb::make_tuple(static_cast<int>(c.kind), c.session, c.generation, c.lane, c.reservation,
                                           c.leg, to_bytes(c.data)));
            }
            return events;
          },
          "Drains the eventfd and returns all events: (kind, session, generation, lane, reservation, leg, data).");
}
