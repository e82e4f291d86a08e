/* SPDX-License-Identifier: MIT */
/* device_impl.h: what a backend calls. What it implements, and what each function promises, is in device.h. */
#ifndef FMHAD_DEVICE_IMPL_H
#define FMHAD_DEVICE_IMPL_H

#include <device/device.h>
#include <proto/error.h>

/* Any thread: the launch has ended. */
void device_launch_done(struct device *device, struct device_launch *launch);

/* Any thread: the first error stays; see device_has_failed(). */
void device_fail(struct device *device, const struct fmha_error *error);

#define DEVICE_QUARANTINED "quarantined" /* why a device does not run a kernel */

/* @code: of a struct plan_stage. */
static inline bool device_is_quarantined(const struct device *device, const char *kernel,
					 uint64_t code)
{
	return device->is_quarantined &&
	       device->is_quarantined(device->quarantine_worker, kernel, code);
}

/* Asks the worker's front for code; see device_builder. */
static inline int device_request_build(struct device *device, struct device_build *build,
				       struct fmha_error *err)
{
	if (!device->builder)
		return fmha_error_set(err, FMHA_ENOTSUP, "%s: there is no compiler here",
				      build->build->name);
	return device->builder(device->builder_worker, build, err);
}

/* Takes the request back; see device_unbuilder. */
static inline void device_cancel_build(struct device *device, struct device_build *build)
{
	if (device->unbuilder)
		device->unbuilder(device->builder_worker, build);
}

/* The name under which a module offers its struct device_ops. */
#define DEVICE_MODULE_SYMBOL "fmhad_device_ops"

extern const struct device_ops cpu_device_ops;
extern const struct device_ops fake_device_ops;

#endif
