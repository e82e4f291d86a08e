/* SPDX-License-Identifier: MIT */
/*
 * npy.h: .npy files, strictly: format 1.0 and 2.0, C order, little endian, and only the element
 * types that attention has. NumPy knows no bfloat16 and no fp8; they travel as uint16 and uint8. int8 is itself.
 */
#ifndef CTL_NPY_H
#define CTL_NPY_H

#include <stddef.h>
#include <stdint.h>

#include <fmha/base.h>

#define NPY_MAX_DIMS         8
#define NPY_MAX_HEADER_BYTES 65536

enum npy_type { NPY_F4, NPY_F2, NPY_U2, NPY_U1, NPY_I4, NPY_I1 };
#define NPY_N_TYPES 6

struct npy {
	enum npy_type type;
	int n_dims;
	int64_t dims[NPY_MAX_DIMS];
	size_t bytes; /* of data: the product of dims and the element size */
	void *data;   /* npy_deinit() frees it */
};

uint32_t npy_type_bytes(enum npy_type type);

/*
 * Reads the header at the start of @data. Never looks beyond @n bytes; a header that is cut off, or
 * anything but what is described above, is an error with the reason.
 * @ret: all but data
 * @ret_data_offset: where the elements begin
 * Return: 0 or FMHA_EIO.
 */
int npy_parse_header(const uint8_t *data, size_t n, struct npy *ret, size_t *ret_data_offset,
		     struct fmha_error *err);

/* A whole file; its length must be exactly what the header says. Return: 0, FMHA_EIO, FMHA_ENOMEM.
 */
int npy_read(const char *path, struct npy *ret, struct fmha_error *err);

/* Format 1.0. A file that cannot be written completely is removed. Return: 0 or FMHA_EIO. */
int npy_write(const char *path, const struct npy *npy, struct fmha_error *err);

void npy_deinit(struct npy *npy);

#endif
