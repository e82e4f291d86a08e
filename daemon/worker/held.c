/* SPDX-License-Identifier: MIT */
#include "held.h"

static int charge(struct account *account, uint64_t bytes, struct fmha_error *err)
{
	int r = account_charge(account, ACCOUNT_KERNELS, 1, err);

	if (r < 0)
		return r;
	r = account_charge(account, ACCOUNT_MEMORY, bytes, err);
	if (r < 0)
		account_release(account, ACCOUNT_KERNELS, 1);
	return r;
}

int held_take(struct device *device, struct account *account, const struct device_kernel *kernel,
	      struct fmha_error *err)
{
	bool is_first;
	int r = device_hold(device, kernel, account->uid, &is_first, err);

	if (r < 0 || !is_first)
		return r;
	r = charge(account, device_kernel_bytes(device, kernel), err);
	if (r < 0)
		(void)device_drop(device, kernel, account->uid);
	return r;
}

void held_drop(struct device *device, struct account *account, const struct device_kernel *kernel)
{
	uint64_t bytes = device_kernel_bytes(device, kernel);

	if (!device_drop(device, kernel, account->uid))
		return;
	account_release(account, ACCOUNT_KERNELS, 1);
	account_release(account, ACCOUNT_MEMORY, bytes);
}
