// Slab, File, Engine, Ticket.
#include <nanobind/stl/optional.h>

#include <chrono>
#include <cmath>

#include "bind.hpp"
#include "forever.hpp"
#include "ring.hpp"
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
            self.let_go();
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

EngineKind take_kind(nb::handle object) {
    if (nb::isinstance<nb::str>(object)) {
        const auto name = nb::cast<std::string>(object);
        if (name == "auto") return EngineKind::automatic;
        if (name == "uring") return EngineKind::uring;
        if (name == "pool") return EngineKind::pool;
    }
    throw nb::value_error("kind is \"auto\", \"uring\" or \"pool\"");
}

unsigned take_count(nb::handle object, const char* name) {
    return static_cast<unsigned>(std::min<std::uint64_t>(take_size(object, name), 1u << 20));
}

nb::dict describe_engine(const PyEngine& e) {
    nb::dict out;
    out["engine"] = e.core->name();
    out["reason"] = e.core->reason();
    out["block"] = e.core->options().block;
    out["depth"] = e.core->options().depth;
    out["limit"] = e.core->options().limit;
    nb::list drives;
    for (const DriveInfo& info : e.core->drives()) {
        nb::dict drive;
        drive["device"] = info.device;
        drive["engine"] = info.engine;
        drive["reason"] = info.reason;
        drive["direct"] = info.direct;
        drive["fixed_files"] = info.fixed_files;
        drive["fixed_buffers"] = info.fixed_buffers;
        nb::list flags;
        for (const auto& flag : info.flags) flags.append(flag);
        drive["flags"] = flags;
        drive["node"] = info.node;
        drive["bytes_read"] = info.bytes_read;
        drive["bytes_written"] = info.bytes_written;
        drives.append(drive);
    }
    out["drives"] = drives;
    return out;
}

// At the end of an engine: what the kernel still has stays for ever.
void settle(PyTicket& ticket) {
    ticket.let_go();
    if (!ticket.keep.empty()) keep_for_ever(std::make_shared<std::vector<Array>>(std::move(ticket.keep)));
    ticket.keep.clear();
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
    for (auto& [key, object] : pending) settle(nb::cast<PyTicket&>(object));
    for (auto& object : overdue) settle(nb::cast<PyTicket&>(object));
    registered.clear();
}

void bind_io(nb::module_& m) {
    nb::class_<Slab>(m, "Slab")
        .def(
            "__init__",
            [](Slab* self, nb::handle nbytes, int node) {
                new (self) Slab(take_size(nbytes, "nbytes"), node);
            },
            nb::arg("nbytes"), nb::arg("node") = -1)
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
            [](File* self, nb::handle path, bool create, bool direct, nb::handle weights, nb::handle stripe) {
                std::vector<std::string> names;
                if (nb::isinstance<nb::list>(path) || nb::isinstance<nb::tuple>(path))
                    for (nb::handle item : nb::iter(path)) names.push_back(take_path(item));
                else
                    names.push_back(take_path(path));
                std::vector<unsigned> shares;
                if (!weights.is_none())
                    for (nb::handle item : nb::iter(weights))
                        shares.push_back(static_cast<unsigned>(
                            std::min<std::uint64_t>(take_size(item, "a stripe weight"), 1u << 20)));
                const std::uint64_t bytes = take_size(stripe, "stripe");
                nb::gil_scoped_release release;
                new (self) File(std::move(names), create, direct, std::move(shares), bytes);
            },
            nb::arg("path"), nb::arg("create") = true, nb::arg("direct") = true, nb::kw_only(),
            nb::arg("weights").none() = nb::none(), nb::arg("stripe") = 0)
        .def_prop_ro("path", [](const File& f) { return fs_string(f.path()); })
        .def_prop_ro("paths",
                     [](const File& f) {
                         nb::list out;
                         for (const auto& path : f.paths()) out.append(fs_string(path));
                         return out;
                     })
        .def_prop_ro("directs",
                     [](const File& f) {
                         nb::list out;
                         for (const bool direct : f.directs()) out.append(direct);
                         return out;
                     })
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
        .def(
            "truncate",
            [](File& f, nb::handle nbytes) {
                const std::uint64_t n = take_size(nbytes, "nbytes");
                nb::gil_scoped_release release;
                f.truncate(n);
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
        .def("result", &result_of)
        .def_prop_ro("phases", [](const PyTicket& t) -> nb::object {
            if (!t.core->done() || !t.core->outcome().record) return nb::none();
            const auto pair = [](const Outcome::Span& span) { return nb::make_tuple(span.begin, span.end); };
            const Outcome& o = t.core->outcome();
            return nb::make_tuple(pair(o.reads), pair(o.computes), pair(o.writes));
        });

    m.def("probe_uring", [] { return probe_uring(); }, nb::call_guard<nb::gil_scoped_release>());

    nb::class_<PyEngine>(m, "Engine")
        .def(
            "__init__",
            [](PyEngine* self, nb::handle kind, nb::handle block, nb::handle depth, nb::handle threads,
               double deadline, nb::handle limit) {
                EngineOptions options;
                options.kind = take_kind(kind);
                options.block = take_size(block, "block");
                options.depth = take_count(depth, "depth");
                options.threads = take_count(threads, "threads");
                options.limit = take_size(limit, "limit");
                if (!(deadline > 0)) throw nb::value_error("deadline must be a positive number of seconds");
                options.deadline = std::chrono::duration_cast<std::chrono::nanoseconds>(
                    std::chrono::duration<double>(std::min(deadline, 1e9)));
                new (self) PyEngine(std::make_shared<Engine>(options));
            },
            nb::kw_only(), nb::arg("kind") = "auto", nb::arg("block") = 4 << 20, nb::arg("depth") = 32,
            nb::arg("threads") = 0, nb::arg("deadline") = 60.0, nb::arg("limit") = 0)
        .def_prop_ro("name", [](const PyEngine& e) { return e.core->name(); })
        .def_prop_ro("block", [](const PyEngine& e) { return e.core->options().block; })
        .def_prop_ro("depth", [](const PyEngine& e) { return e.core->options().depth; })
        .def("describe", &describe_engine)
        .def(
            "register",
            [](PyEngine& e, nb::handle buffer) {
                Array array = take_array(buffer, "buffer", {Kind::u8}, true, 1);
                bool fixed = false;
                {
                    nb::gil_scoped_release release;
                    fixed = e.core->fix(array.data, array.count);
                }
                if (array.count != 0) e.registered.insert_or_assign(array.data, array);
                return fixed;
            },
            nb::arg("buffer"))
        .def(
            "unregister",
            [](PyEngine& e, nb::handle buffer) {
                Array array = take_array(buffer, "buffer", {Kind::u8}, true, 1);
                e.core->unfix(array.data);
                e.registered.erase(array.data);
            },
            nb::arg("buffer"))
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
                     PyTicket& py = nb::cast<PyTicket&>(found->second);
                     py.let_go();
                     if (!py.keep.empty()) e.overdue.push_back(found->second);
                     out.append(found->second);
                     e.pending.erase(found);
                 }
                 std::erase_if(e.overdue, [](nb::object& object) {
                     PyTicket& py = nb::cast<PyTicket&>(object);
                     py.let_go();
                     return py.keep.empty();
                 });
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
                 out["read_ns"] = c.read_ns;
                 out["write_ns"] = c.write_ns;
                 out["busy_ns"] = c.busy_ns;
                 return out;
             })
        .def("close", &PyEngine::close);
}

}  // namespace tz
