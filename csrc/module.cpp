// The Python module tierzero._native: one bind_*.cpp per part of the core.
#include "bind.hpp"

NB_MODULE(_native, m) {
    nb::set_leak_warnings(
        false);  // objects in module globals outlive the interpreter; that is no leak worth a line
    m.attr("__version__") = TIERZERO_VERSION;
    tz::bind_errors(m);
    tz::bind_io(m);
    tz::bind_math(m);
    tz::bind_format(m);
    tz::bind_stepper(m);
}
