/* SPDX-License-Identifier: MIT */
/*
 * convert.c: loads and stores of every element type, from the definition of the formats.
 *
 * A small float is sign, exponent and mantissa fields; with exponent field 0 the value is
 * mantissa * 2^(1 - bias - bits), else (2^bits + mantissa) * 2^(field - bias - bits). Double holds
 * all of them exactly.
 */
#include <math.h>
#include <string.h>

#include "internal.h"

struct format {
	int mantissa_bits, exponent_bits;
	bool has_infinity; /* exponent field all ones: infinity and NaN. Without: only S.1111.111 is
			      NaN */
	bool saturates;    /* a finite value beyond the largest becomes the largest */
};

static const struct format format_f16 = {10, 5, true, false};
static const struct format format_bf16 = {7, 8, true, false};
static const struct format format_e4m3 = {3, 4, false, true};
static const struct format format_e5m2 = {2, 5, true, true};

static int format_bias(const struct format *f)
{
	return (1 << (f->exponent_bits - 1)) - 1;
}

static double format_decode(const struct format *f, uint32_t bits)
{
	uint32_t mantissa = bits & ((1u << f->mantissa_bits) - 1);
	uint32_t top = (1u << f->exponent_bits) - 1;
	uint32_t field = (bits >> f->mantissa_bits) & top;
	bool negative = bits >> (f->mantissa_bits + f->exponent_bits);
	double magnitude;

	if (f->has_infinity && field == top)
		magnitude = mantissa ? NAN : INFINITY;
	else if (!f->has_infinity && field == top && mantissa == (1u << f->mantissa_bits) - 1)
		magnitude = NAN;
	else if (field == 0)
		magnitude = ldexp(mantissa, 1 - format_bias(f) - f->mantissa_bits);
	else
		magnitude = ldexp(mantissa + (1u << f->mantissa_bits),
				  (int)field - format_bias(f) - f->mantissa_bits);
	return negative ? -magnitude : magnitude;
}

/* Round to nearest even. nearbyint() in the default rounding mode does the rounding: the value is
 * first scaled so that one unit in the last place is 1. */
static uint32_t format_encode(const struct format *f, double value)
{
	uint32_t sign = (signbit(value) ? 1u : 0u) << (f->mantissa_bits + f->exponent_bits);
	uint32_t top = ((1u << f->exponent_bits) - 1) << f->mantissa_bits;
	uint32_t infinity = top;
	uint32_t nan = f->has_infinity ? top | 1u << (f->mantissa_bits - 1)
				       : top | ((1u << f->mantissa_bits) - 1);
	uint32_t largest = f->has_infinity ? top - 1 : nan - 1;
	int exponent_min = 1 - format_bias(f);
	double magnitude = fabs(value), rounded;
	uint64_t bits;
	int exponent;

	if (isnan(value))
		return sign | nan;
	if (isinf(value))
		return sign | (f->has_infinity ? infinity : nan);
	if (magnitude == 0)
		return sign;
	exponent = ilogb(magnitude);
	if (exponent < exponent_min)
		exponent = exponent_min;
	if (exponent > format_bias(f) + 1)
		return sign | (f->saturates ? largest : infinity);
	rounded = nearbyint(ldexp(magnitude, f->mantissa_bits - exponent));
	/* The implicit bit adds 1 to the exponent field, and so does a carry out of the mantissa.
	 */
	bits = ((uint64_t)(exponent - exponent_min) << f->mantissa_bits) + (uint64_t)rounded;
	if (bits > largest)
		return sign | (f->saturates ? largest : infinity);
	return sign | (uint32_t)bits;
}

static const struct format *format_of(uint32_t dtype)
{
	switch (dtype) {
	case ABI_F16:
		return &format_f16;
	case ABI_BF16:
		return &format_bf16;
	case ABI_E4M3:
		return &format_e4m3;
	case ABI_E5M2:
		return &format_e5m2;
	default:
		return NULL;
	}
}

int32_t reference_dtype_bytes(uint32_t dtype)
{
	switch (dtype) {
	case ABI_F32:
	case ABI_I32:
		return 4;
	case ABI_I64:
		return 8;
	case ABI_F16:
	case ABI_BF16:
		return 2;
	default:
		return 1;
	}
}

double reference_load(const void *data, uint32_t dtype, int64_t index)
{
	const struct format *f = format_of(dtype);
	uint16_t half;

	if (f && reference_dtype_bytes(dtype) == 1)
		return format_decode(f, ((const uint8_t *)data)[index]);
	if (f) {
		memcpy(&half, (const uint8_t *)data + 2 * index, sizeof(half));
		return format_decode(f, half);
	}
	if (dtype == ABI_F32)
		return ((const float *)data)[index];
	if (dtype == ABI_I32)
		return ((const int32_t *)data)[index];
	if (dtype == ABI_I64)
		return (double)((const int64_t *)data)[index];
	if (dtype == ABI_I8)
		return ((const int8_t *)data)[index];
	return ((const uint8_t *)data)[index];
}

void reference_store(void *data, uint32_t dtype, int64_t index, double value)
{
	const struct format *f = format_of(dtype);
	uint16_t half;

	if (f && reference_dtype_bytes(dtype) == 1) {
		((uint8_t *)data)[index] = (uint8_t)format_encode(f, value);
	} else if (f) {
		half = (uint16_t)format_encode(f, value);
		memcpy((uint8_t *)data + 2 * index, &half, sizeof(half));
	} else if (dtype == ABI_F32) {
		((float *)data)[index] = (float)value;
	} else if (dtype == ABI_I32) {
		((int32_t *)data)[index] = (int32_t)value;
	} else if (dtype == ABI_I64) {
		((int64_t *)data)[index] = (int64_t)value;
	} else if (dtype == ABI_I8) { /* as new rows become it: as much of either sign, no NaN */
		value = isnan(value) ? 0 : fmin(fmax(nearbyint(value), -127), 127);
		((int8_t *)data)[index] = (int8_t)value;
	} else {
		((uint8_t *)data)[index] = (uint8_t)value;
	}
}

double reference_round(uint32_t dtype, double value)
{
	uint64_t raw[1];

	reference_store(raw, dtype, 0, value);
	return reference_load(raw, dtype, 0);
}
