// SPDX-License-Identifier: MIT
// exception.cpp: exceptions from slot.c's functions through torch to Python.
//
// torch's C shim turns exceptions into numbers. What Python raised has to arrive as itself (an OutOfMemoryError of torch's is
// caught by name), so it is carried over as torch carries it: by its own class python_error, which its bindings catch by name.
// The class is written down here as torch 2.11 to 2.15 have it; fmha._native_slot asks for those versions.

#include "exception.h"

#include <exception>
#include <stdexcept>
#include <string>

#include <dlfcn.h>

namespace
{
struct {
	int (*ensure)();
	void (*release)(int);
	void (*take)(void *);
	void (*give)(void *);
} python;
} // namespace

// By this name; the compiler's own names for hidden and visible classes are the same.
struct __attribute__((visibility("default"))) python_error : public std::exception {
	explicit python_error(const slot_exception &from)
	    : type(from.type), value(from.value), traceback(from.traceback)
	{
	}
	python_error(const python_error &other)
	    : std::exception(other), type(other.type), value(other.value),
	      traceback(other.traceback), message(other.message)
	{
		const int state = python.ensure();

		python.take(type);
		python.take(value);
		python.take(traceback);
		python.release(state);
	}
	python_error &operator=(const python_error &other) = delete;
	~python_error() override
	{
		const int state = python.ensure();

		python.give(type);
		python.give(value);
		python.give(traceback);
		python.release(state);
	}
	const char *what() const noexcept override
	{
		return message.c_str();
	}

	void *type, *value, *traceback;
	std::string message = "python_error";
};

int slot_python_find(void)
{
	const auto find = [](const char *name) { return dlsym(RTLD_DEFAULT, name); };

	python.ensure = reinterpret_cast<int (*)()>(find("PyGILState_Ensure"));
	python.release = reinterpret_cast<void (*)(int)>(find("PyGILState_Release"));
	python.take = reinterpret_cast<void (*)(void *)>(find("Py_IncRef"));
	python.give = reinterpret_cast<void (*)(void *)>(find("Py_DecRef"));
	return python.ensure && python.release && python.take && python.give;
}

void slot_exception_take(slot_exception *exception, uintptr_t type, uintptr_t value,
			 uintptr_t traceback)
{
	exception->type = reinterpret_cast<void *>(type);
	exception->value = reinterpret_cast<void *>(value);
	exception->traceback = reinterpret_cast<void *>(traceback);
	python.take(exception->type);
	python.take(exception->value);
	python.take(exception->traceback);
}

void slot_exception_throw(const slot_exception *exception)
{
	throw python_error(*exception);
}

void slot_failure_throw(const char *sentence)
{
	throw std::runtime_error(sentence);
}

void slot_word_free(uint64_t *word)
{
	delete word;
}
