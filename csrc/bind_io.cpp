// Slab, File, Engine, Ticket.
#include <nanobind/stl/optional.h>

#include <chrono>
#include <cmath>

#include "bind.hpp"
#include "slab.hpp"

namespace tz {

namespace {

std::string take_path(nb::handle object) {
    PyObject* raw = nullptr;
    if (!PyUnicode_FSConverter(object.ptr(), &raw)) throw nb::python_error();
    nb::object bytes = nb::steal(raw);
    return {PyBytes_AS_STRING(raw), static_cast<std::size_t>(PyBytes_GET_SIZE(raw))};
}

nb::object fs_string(const std::string& s) {
    return nb::steal(PyUnicode_DecodeFSDefaultAndSize(s.data(), static_cast<Py_ssize_t>(s.size())));
}

// Waits without the GIL, in slices, so that Ctrl-C gets through.
bool wait_for(PyTicket& self, std::optional<double> timeout) {
    using clock = std::chrono::steady_clock;
    const bool forever = !timeout || *timeout > 1e9;
    if (!forever && !(*timeout >= 0))
        throw nb::value_error("timeout must be a number of seconds, not negative");
    const auto until = clock::now() + std::chrono::duration_cast<clock::duration>(
                                          std::chrono::duration<double>(forever ? 0 : *timeout));
    const std::chrono::nanoseconds slice = std::chrono::milliseconds(100);
    for (;;) {
        bool done = false;
        std::chrono::nanoseconds left = slice;
        if (!forever)
            left = std::max(std::chrono::nanoseconds(0),
                            std::min<std::chrono::nanoseconds>(slice, until - clock::now()));
        {
            nb::gil_scoped_release release;
            done = self.core->wait(left);
        }
        if (done) {
            self.keep.clear();
            return true;
        }
        if (PyErr_CheckSignals() != 0) throw nb::python_error();
        if (!forever && clock::now() >= until) return false;
    }
}

nb::object pair_of(const std::optional<Checksum>& sum) {
    if (!sum) return nb::none();
    return nb::make_tuple(sum->s1, sum->s2);
}

nb::object result_of(PyTicket& self) {
    wait_for(self, std::nullopt);
    const Outcome& outcome = self.core->outcome();
    if (outcome.record) return nb::make_tuple(pair_of(outcome.state), pair_of(outcome.copy));
    return nb::int_(outcome.bytes);
}

std::vector<Array> keep_one(Array array) {
    std::vector<Array> keep;
    keep.push_back(std::move(array));
    return keep;
}

nb::object submit(PyEngine& self, Op op, const File& file, nb::handle offset, nb::handle buffer) {
    const bool reading = op == Op::read;
    const std::uint64_t at = take_size(offset, "offset");
    Array array = take_array(buffer, reading ? "into" : "data", {Kind::u8}, reading, 1);
    auto ticket =
        self.core->transfer(op, file, at, array.data, array.count);  // the GIL keeps `array` until tracked
    return self.track(std::move(ticket), keep_one(std::move(array)));
}

}  // namespace

PyEngine::PyEngine(std::shared_ptr<Engine> engine) : core(std::move(engine)) {
    at_exit(this, [](void* self) { static_cast<PyEngine*>(self)->close(); });
}

PyEngine::~PyEngine() {
    forget_at_exit(this);
    if (core->foreign()) {
        new std::shared_ptr<Engine>(
            std::move(core));  // after fork its threads do not exist: leave it all alone
        return;
    }
    close();
}

nb::object PyEngine::track(std::shared_ptr<Ticket> ticket, std::vector<Array> keep) {
    const Ticket* key = ticket.get();
    nb::object object = nb::cast(PyTicket{std::move(ticket), std::move(keep)});
    pending.emplace(key, object);
    return object;
}

void PyEngine::close() {
    if (core->foreign()) return;
    {
        nb::gil_scoped_release release;
        core->close();
    }
    for (auto& [key, object] : pending) nb::cast<PyTicket&>(object).keep.clear();
}

void bind_io(nb::module_& m) {
    nb::class_<Slab>(m, "Slab")
        .def(
            "__init__", [](Slab* self, nb::handle nbytes) { new (self) Slab(take_size(nbytes, "nbytes")); },
            nb::arg("nbytes"))
        .def_prop_ro("nbytes", &Slab::size)
        .def_prop_ro("address", [](const Slab& s) { return reinterpret_cast<std::uintptr_t>(s.data()); })
        .def("array",
             [](nb::handle self) {
                 Slab& slab = nb::cast<Slab&>(self);
                 return nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>(slab.data(), {slab.size()}, self);
             })
        .def("huge_bytes", &Slab::huge_bytes, nb::call_guard<nb::gil_scoped_release>());

    nb::class_<File>(m, "File")
        .def(
            "__init__",
            [](File* self, nb::handle path, bool create, bool direct) {
                const std::string name = take_path(path);
                nb::gil_scoped_release release;
                new (self) File(name, create, direct);
            },
            nb::arg("path"), nb::arg("create") = true, nb::arg("direct") = true)
        .def_prop_ro("path", [](const File& f) { return fs_string(f.path()); })
        .def_prop_ro("direct", &File::direct)
        .def_prop_ro("alignment", &File::alignment)
        .def_prop_ro("closed", &File::closed)
        .def("size", &File::size)
        .def(
            "preallocate",
            [](File& f, nb::handle nbytes) {
                const std::uint64_t n = take_size(nbytes, "nbytes");
                nb::gil_scoped_release release;
                f.preallocate(n);
            },
            nb::arg("nbytes"))
        .def("sync", &File::sync, nb::call_guard<nb::gil_scoped_release>())
        .def("close", &File::close, nb::call_guard<nb::gil_scoped_release>());

    nb::class_<PyTicket>(m, "Ticket")
        .def("done", [](const PyTicket& t) { return t.core->done(); })
        .def(
            "wait",
            [](PyTicket& t, std::optional<double> timeout) {
                if (!wait_for(t, timeout)) {
                    PyErr_SetString(PyExc_TimeoutError, "the request is still in flight");
                    throw nb::python_error();
                }
            },
            nb::arg("timeout") = nb::none())
        .def("result", &result_of);

    nb::class_<PyEngine>(m, "Engine")
        .def(
            "__init__",
            [](PyEngine* self, nb::handle threads, nb::handle block) {
                const std::uint64_t n = take_size(threads, "threads");
                const std::uint64_t bytes = take_size(block, "block");
                new (self) PyEngine(std::make_shared<Engine>(
                    static_cast<unsigned>(std::min<std::uint64_t>(n, 1u << 20)), bytes));
            },
            nb::arg("threads") = 4, nb::arg("block") = 4 << 20)
        .def_prop_ro("name", [](const PyEngine&) { return "pool"; })
        .def_prop_ro("eventfd", [](const PyEngine& e) { return e.core->completions()->eventfd(); })
        .def(
            "read",
            [](PyEngine& e, const File& file, nb::handle offset, nb::handle into) {
                return submit(e, Op::read, file, offset, into);
            },
            nb::arg("file"), nb::arg("offset"), nb::arg("into"))
        .def(
            "write",
            [](PyEngine& e, const File& file, nb::handle offset, nb::handle data) {
                return submit(e, Op::write, file, offset, data);
            },
            nb::arg("file"), nb::arg("offset"), nb::arg("data"))
        .def("reap",
             [](PyEngine& e) {
                 nb::list out;
                 for (const auto& ticket : e.core->completions()->reap()) {
                     const auto found = e.pending.find(ticket.get());
                     if (found == e.pending.end()) continue;
                     nb::cast<PyTicket&>(found->second).keep.clear();
                     out.append(found->second);
                     e.pending.erase(found);
                 }
                 return out;
             })
        .def("counters",
             [](const PyEngine& e) {
                 const Counters c = e.core->counters();
                 nb::dict out;
                 out["bytes_read"] = c.bytes_read;
                 out["bytes_written"] = c.bytes_written;
                 out["reads"] = c.reads;
                 out["writes"] = c.writes;
                 return out;
             })
        .def("close", &PyEngine::close);
}

}  // namespace tz
