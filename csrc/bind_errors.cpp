// IoFailure becomes OSError(errno, sentence, path), of the subclass that errno selects; invalid_argument
// ValueError.
#include <system_error>
#include <utility>

#include "bind.hpp"

namespace tz {

namespace {

std::vector<std::pair<void*, void (*)(void*)>>& exits() {
    static auto* list = new std::vector<std::pair<void*, void (*)(void*)>>;  // never destroyed: used at exit
    return *list;
}

void translate(const std::exception_ptr& raised, void*) {
    try {
        std::rethrow_exception(raised);
    } catch (const IoFailure& failure) {
        const IoError& e = failure.error;
        nb::object path = nb::none();
        if (!e.path.empty())
            path = nb::steal(
                PyUnicode_DecodeFSDefaultAndSize(e.path.data(), static_cast<Py_ssize_t>(e.path.size())));
        nb::object error =
            nb::steal(PyObject_CallFunction(PyExc_OSError, "isO", e.code, e.message.c_str(), path.ptr()));
        if (error.is_valid()) PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
    } catch (const std::system_error& failure) {
        PyObject* const args = Py_BuildValue("(is)", failure.code().value(),
                                             "a thread cannot be started: "
                                             "raise the limit of processes, or use fewer threads");
        if (args) PyErr_SetObject(PyExc_OSError, args);
        Py_XDECREF(args);
    } catch (const std::invalid_argument& failure) {  // its sentence may name a path that is not UTF-8
        nb::object text = nb::steal(PyUnicode_DecodeFSDefault(failure.what()));
        if (text.is_valid()) PyErr_SetObject(PyExc_ValueError, text.ptr());
    }
}

}  // namespace

void at_exit(void* owner, void (*close)(void*)) {
    exits().emplace_back(owner, close);
}

void forget_at_exit(void* owner) {
    std::erase_if(exits(), [owner](const auto& entry) { return entry.first == owner; });
}

void bind_errors(nb::module_& m) {
    nb::register_exception_translator(translate);
    // Requests in flight end before the interpreter tears their buffers down.
    nb::object close_all = nb::cpp_function([] {
        while (!exits().empty()) {
            const auto [owner, close] = exits().back();
            exits().pop_back();
            close(owner);
        }
    });
    nb::module_::import_("atexit").attr("register")(close_all);
    (void)m;
}

}  // namespace tz
