/* SPDX-License-Identifier: MIT */
/*
 * roof.h: the least time that a plan takes on a device that nothing holds up: its operations at the
 * rate of their type, or its bytes at the memory's, whichever takes longer. What is configured goes
 * before what the device says of itself (struct device_peak).
 */
#ifndef FMHAD_WORKER_ROOF_H
#define FMHAD_WORKER_ROOF_H

#include <stdbool.h>

#include <device/device.h>

struct roof {
	struct device_peak peak;
	bool configured_flops, configured_bytes;
};

void roof_init(struct roof *roof, const struct config_device *config,
	       const struct device_info *info);
/* 0: not known, or nothing to do. */
double roof_ns(const struct roof *roof, const struct plan *plan);
/* {"gbs", "tflops": {"f32", "f16", "fp8"}, "source": {"gbs", "tflops"}}, only what is known; given. */
struct cJSON *roof_json(const struct roof *roof);

#endif
