/* SPDX-License-Identifier: MIT */
#ifndef FMHAD_DEVICE_MPS_H
#define FMHAD_DEVICE_MPS_H

#include <stdbool.h>
#include <stddef.h>

/* Whether a CUDA MPS control daemon answers. @ret_directory: where it was looked for. */
bool mps_is_running(char *ret_directory, size_t n);

#endif
