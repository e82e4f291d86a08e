/* SPDX-License-Identifier: MIT */
/* held.h: compiled kernels that plans have, or are about to have, in their users' accounts. */
#ifndef FMHAD_WORKER_HELD_H
#define FMHAD_WORKER_HELD_H

#include <base/account.h>
#include <device/device.h>

/*
 * The account's user has the kernel once more; the first time it is charged, with the bytes of its code.
 * NULL is no kernel.
 * Return: 0, FMHA_EQUOTA, FMHA_ENOMEM.
 */
int held_take(struct device *device, struct account *account, const struct device_kernel *kernel,
	      struct fmha_error *err);
/* Once less. */
void held_drop(struct device *device, struct account *account, const struct device_kernel *kernel);

#endif
