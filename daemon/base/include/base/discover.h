/* SPDX-License-Identifier: MIT */
/*
 * discover.h: which GPUs this machine seems to have, by what the kernel's drivers show and
 * without opening any of them: the front must not.
 */
#ifndef FMHAD_BASE_DISCOVER_H
#define FMHAD_BASE_DISCOVER_H

#include <base/config.h>

/*
 * Appends one device a GPU to @devices, as copies of @model with backend and index set.
 * @dev, @sys: "/dev" and "/sys"; tests give others
 * Return: the new number of devices, at most @capacity.
 */
uint32_t discover_gpus(const char *dev, const char *sys, const struct config_device *model,
		       struct config_device *devices, uint32_t n_devices, uint32_t capacity);

#endif
