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
	return device->calls->is_quarantined &&
	       device->calls->is_quarantined(device->owner, kernel, code);
}

/* Asks the owner for code. */
static inline int device_request_build(struct device *device, struct device_build *build,
				       struct fmha_error *err)
{
	if (!device->calls->build)
		return fmha_error_set(err, FMHA_ENOTSUP, "%s: there is no compiler here",
				      build->build->name);
	return device->calls->build(device->owner, build, err);
}

/* Takes the request back. */
static inline void device_cancel_build(struct device *device, struct device_build *build)
{
	if (device->calls->cancel_build)
		device->calls->cancel_build(device->owner, build);
}

/* The name under which a module offers its struct device_ops. */
#define DEVICE_MODULE_SYMBOL "fmhad_device_ops"

extern const struct device_ops cpu_device_ops;
extern const struct device_ops fake_device_ops;

#endif
