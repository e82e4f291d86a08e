/* SPDX-License-Identifier: MIT */
#include "npy.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <proto/error.h>

#define MAGIC        "\x93NUMPY"
#define MAGIC_BYTES  6
#define HEADER_ALIGN 64
#define PREAMBLE_V1  10 /* magic, version, 2 bytes of length */
#define PREAMBLE_V2  12 /* magic, version, 4 bytes of length */

static const struct {
	const char *descr, *alias; /* both are written by some NumPy */
	uint32_t bytes;
} types[NPY_N_TYPES] = {
	[NPY_F4] = {"<f4", "<f4", 4}, [NPY_F2] = {"<f2", "<f2", 2}, [NPY_U2] = {"<u2", "<u2", 2},
	[NPY_U1] = {"|u1", "<u1", 1}, [NPY_I4] = {"<i4", "<i4", 4}, [NPY_I1] = {"|i1", "<i1", 1},
};

uint32_t npy_type_bytes(enum npy_type type)
{
	return types[type].bytes;
}

/* ---- the header's dictionary: a Python literal with three keys ---- */

struct scanner {
	const char *at, *end;
};

static void skip_spaces(struct scanner *s)
{
	while (s->at < s->end && (*s->at == ' ' || *s->at == '\n' || *s->at == '\t'))
		s->at++;
}

static bool npy_take(struct scanner *s, char c)
{
	skip_spaces(s);
	if (s->at >= s->end || *s->at != c)
		return false;
	s->at++;
	return true;
}

static bool take_word(struct scanner *s, const char *word)
{
	size_t n = strlen(word);

	skip_spaces(s);
	if ((size_t)(s->end - s->at) < n || memcmp(s->at, word, n) != 0)
		return false;
	s->at += n;
	return true;
}

/* A string in either kind of quotes, without escapes. */
static bool take_string(struct scanner *s, char *text, size_t capacity)
{
	size_t n = 0;
	char quote;

	skip_spaces(s);
	if (s->at >= s->end || (*s->at != '\'' && *s->at != '"'))
		return false;
	quote = *s->at++;
	while (s->at < s->end && *s->at != quote) {
		if (*s->at == '\\' || *s->at < ' ' || n + 1 >= capacity)
			return false;
		text[n++] = *s->at++;
	}
	text[n] = '\0';
	return npy_take(s, quote);
}

static bool take_number(struct scanner *s, int64_t *ret)
{
	int64_t value = 0;
	const char *start;

	skip_spaces(s);
	for (start = s->at; s->at < s->end && *s->at >= '0' && *s->at <= '9'; s->at++) {
		if (value > (INT64_MAX - 9) / 10)
			return false;
		value = value * 10 + (*s->at - '0');
	}
	*ret = value;
	return s->at > start;
}

/* (), (3,), (2, 3), (2, 3,) */
static bool take_shape(struct scanner *s, struct npy *ret)
{
	ret->n_dims = 0;
	if (!npy_take(s, '('))
		return false;
	while (!npy_take(s, ')')) {
		if (ret->n_dims == NPY_MAX_DIMS || !take_number(s, &ret->dims[ret->n_dims]))
			return false;
		ret->n_dims++;
		if (!npy_take(s, ',')) {
			/* One dimension has a comma, else it is a number in parentheses. */
			return ret->n_dims > 1 && npy_take(s, ')');
		}
	}
	return true;
}

static int type_from_descr(const char *descr, enum npy_type *ret, struct fmha_error *err)
{
	for (int i = 0; i < NPY_N_TYPES; i++) {
		if (!strcmp(descr, types[i].descr) || !strcmp(descr, types[i].alias)) {
			*ret = (enum npy_type)i;
			return 0;
		}
	}
	return fmha_error_set(err, FMHA_EIO,
			      "elements are '%s', not float32 (<f4), float16 (<f2), uint16 (<u2: "
			      "bfloat16), uint8 "
			      "(|u1: fp8), int8 (|i1) or int32 (<i4), little endian",
			      descr);
}

static int count_bytes(struct npy *ret, struct fmha_error *err)
{
	uint64_t bytes = npy_type_bytes(ret->type);

	for (int i = 0; i < ret->n_dims; i++) {
		if (__builtin_mul_overflow(bytes, (uint64_t)ret->dims[i], &bytes) ||
		    bytes > INT64_MAX)
			return fmha_error_set(err, FMHA_EIO, "the shape has more than 2^63 bytes");
	}
	ret->bytes = (size_t)bytes;
	return 0;
}

static int parse_dictionary(const char *text, size_t n, struct npy *ret, struct fmha_error *err)
{
	bool has_descr = false, has_order = false, has_shape = false;
	struct scanner s = {text, text + n};
	char key[32], descr[32];
	int r;

	if (!npy_take(&s, '{'))
		return fmha_error_set(err, FMHA_EIO, "the header is no dictionary");
	while (!npy_take(&s, '}')) {
		if (!take_string(&s, key, sizeof(key)) || !npy_take(&s, ':'))
			return fmha_error_set(err, FMHA_EIO, "the header is no dictionary");
		if (!strcmp(key, "descr") && !has_descr) {
			has_descr = true;
			if (!take_string(&s, descr, sizeof(descr)))
				return fmha_error_set(
					err, FMHA_EIO,
					"descr is no plain type: structured arrays are not read");
			r = type_from_descr(descr, &ret->type, err);
			if (r < 0)
				return r;
		} else if (!strcmp(key, "fortran_order") && !has_order) {
			has_order = true;
			if (!take_word(&s, "False"))
				return fmha_error_set(
					err, FMHA_EIO,
					"not in C order: use numpy.ascontiguousarray()");
		} else if (!strcmp(key, "shape") && !has_shape) {
			has_shape = true;
			if (!take_shape(&s, ret))
				return fmha_error_set(err, FMHA_EIO,
						      "shape is no tuple of up to %d numbers",
						      NPY_MAX_DIMS);
		} else {
			return fmha_error_set(err, FMHA_EIO, "the header has a key '%s'%s", key,
					      has_descr || has_order || has_shape ? " too many"
										  : "");
		}
		if (!npy_take(&s, ',')) {
			if (!npy_take(&s, '}'))
				return fmha_error_set(err, FMHA_EIO, "the header is no dictionary");
			break;
		}
	}
	skip_spaces(&s);
	if (s.at != s.end)
		return fmha_error_set(err, FMHA_EIO, "the header goes on after its dictionary");
	if (!has_descr || !has_order || !has_shape)
		return fmha_error_set(err, FMHA_EIO,
				      "the header lacks descr, fortran_order or shape");
	return count_bytes(ret, err);
}

int npy_parse_header(const uint8_t *data, size_t n, struct npy *ret, size_t *ret_data_offset,
		     struct fmha_error *err)
{
	size_t preamble, length;
	int r;

	memset(ret, 0, sizeof(*ret));
	if (n < PREAMBLE_V1 || memcmp(data, MAGIC, MAGIC_BYTES) != 0)
		return fmha_error_set(err, FMHA_EIO, "no .npy file");
	if ((data[6] != 1 && data[6] != 2) || data[7] != 0)
		return fmha_error_set(err, FMHA_EIO, "format %u.%u is not 1.0 or 2.0", data[6],
				      data[7]);
	preamble = data[6] == 1 ? PREAMBLE_V1 : PREAMBLE_V2;
	if (n < preamble)
		return fmha_error_set(err, FMHA_EIO, "the file ends inside its header");
	length = data[8] | (size_t)data[9] << 8;
	if (data[6] == 2)
		length |= (size_t)data[10] << 16 | (size_t)data[11] << 24;
	if (length > NPY_MAX_HEADER_BYTES)
		return fmha_error_set(err, FMHA_EIO, "a header of %zu bytes", length);
	if (n - preamble < length)
		return fmha_error_set(err, FMHA_EIO, "the file ends inside its header");
	r = parse_dictionary((const char *)data + preamble, length, ret, err);
	if (r < 0)
		return r;
	*ret_data_offset = preamble + length;
	return 0;
}

/* ---- files ---- */

/* Up to @n bytes; fewer only at the end of the file. */
static ssize_t read_all(int fd, void *data, size_t n)
{
	size_t done = 0;

	while (done < n) {
		ssize_t r = read(fd, (uint8_t *)data + done, n - done);

		if (r < 0 && errno == EINTR)
			continue;
		if (r < 0)
			return -1;
		if (r == 0)
			break;
		done += (size_t)r;
	}
	return (ssize_t)done;
}

static int read_elements(int fd, size_t offset, struct npy *ret, struct fmha_error *err)
{
	struct stat st;
	ssize_t n;

	if (fstat(fd, &st) < 0)
		return fmha_error_set(err, FMHA_EIO, "%s", strerror(errno));
	if (!S_ISREG(st.st_mode))
		return fmha_error_set(err, FMHA_EIO, "no regular file");
	if ((uint64_t)st.st_size != (uint64_t)offset + ret->bytes)
		return fmha_error_set(err, FMHA_EIO,
				      "the shape needs %zu bytes of elements, the file has %lld",
				      ret->bytes, (long long)st.st_size - (long long)offset);
	ret->data = malloc(ret->bytes ? ret->bytes : 1);
	if (!ret->data)
		return fmha_error_set(err, FMHA_ENOMEM, "%zu bytes: out of memory", ret->bytes);
	if (lseek(fd, (off_t)offset, SEEK_SET) < 0)
		return fmha_error_set(err, FMHA_EIO, "%s", strerror(errno));
	n = read_all(fd, ret->data, ret->bytes);
	if (n < 0 || (size_t)n != ret->bytes)
		return fmha_error_set(err, FMHA_EIO, "%s",
				      n < 0 ? strerror(errno)
					    : "the file shrank while it was read");
	return 0;
}

/* What went wrong gets the file's name in front. */
static int name_file(struct fmha_error *err, const char *path, int code)
{
	char msg[sizeof(err->msg)];

	if (!err)
		return code;
	memcpy(msg, err->msg, sizeof(msg));
	return fmha_error_set(err, code, "%.100s: %s", path, msg);
}

int npy_read(const char *path, struct npy *ret, struct fmha_error *err)
{
	uint8_t *header = malloc(PREAMBLE_V2 + NPY_MAX_HEADER_BYTES);
	struct npy npy = {0};
	size_t offset = 0;
	ssize_t n = -1;
	int fd, r;

	if (!header)
		return fmha_error_set(err, FMHA_ENOMEM, "%s: out of memory", path);
	fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a FIFO must not block */
	if (fd >= 0)
		n = read_all(fd, header, PREAMBLE_V2 + NPY_MAX_HEADER_BYTES);
	if (n < 0)
		r = fmha_error_set(err, FMHA_EIO, "%s", strerror(errno));
	else
		r = npy_parse_header(header, (size_t)n, &npy, &offset, err);
	if (r == 0)
		r = read_elements(fd, offset, &npy, err);
	free(header);
	if (fd >= 0)
		(void)close(fd);
	if (r < 0) {
		npy_deinit(&npy);
		return name_file(err, path, r);
	}
	*ret = npy;
	return 0;
}

/* The header as bytes, padded so that the elements begin at a multiple of HEADER_ALIGN. */
static size_t format_header(const struct npy *npy, uint8_t header[512])
{
	char *text = (char *)header + PREAMBLE_V1;
	size_t n, end;

	n = (size_t)snprintf(text, 400, "{'descr': '%s', 'fortran_order': False, 'shape': (",
			     types[npy->type].descr);
	for (int i = 0; i < npy->n_dims; i++)
		n += (size_t)snprintf(text + n, 400 - n, "%lld,%s", (long long)npy->dims[i],
				      i + 1 < npy->n_dims ? " " : "");
	n += (size_t)snprintf(text + n, 400 - n, "), }");
	end = (PREAMBLE_V1 + n + 1 + HEADER_ALIGN - 1) / HEADER_ALIGN * HEADER_ALIGN;
	memset(header + PREAMBLE_V1 + n, ' ', end - PREAMBLE_V1 - n - 1);
	header[end - 1] = '\n';
	memcpy(header, MAGIC, MAGIC_BYTES); // NOLINT(bugprone-not-null-terminated-result)
	header[6] = 1;
	header[7] = 0;
	header[8] = (uint8_t)((end - PREAMBLE_V1) & 0xff);
	header[9] = (uint8_t)((end - PREAMBLE_V1) >> 8);
	return end;
}

static bool write_all(int fd, const void *data, size_t n)
{
	size_t done = 0;

	while (done < n) {
		ssize_t r = write(fd, (const uint8_t *)data + done, n - done);

		if (r < 0 && errno == EINTR)
			continue;
		if (r <= 0)
			return false;
		done += (size_t)r;
	}
	return true;
}

int npy_write(const char *path, const struct npy *npy, struct fmha_error *err)
{
	uint8_t header[512];
	size_t n = format_header(npy, header);
	struct stat st;
	bool written, regular;
	int fd, e;

	fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
	if (fd < 0)
		return fmha_error_set(err, FMHA_EIO, "%s: %s", path, strerror(errno));
	regular = fstat(fd, &st) == 0 && S_ISREG(st.st_mode);
	written = write_all(fd, header, n) && write_all(fd, npy->data, npy->bytes);
	e = errno;
	if (close(fd) < 0 && written) {
		written = false;
		e = errno;
	}
	if (written)
		return 0;
	if (regular) /* never a device, whatever it was that failed */
		(void)unlink(path);
	return fmha_error_set(err, FMHA_EIO, "%s: %s", path, strerror(e));
}

void npy_deinit(struct npy *npy)
{
	free(npy->data);
	npy->data = NULL;
}
