/* SPDX-License-Identifier: MIT */
/* page_numbers.h: numbers of a pool's pages as messages carry them (pool_pages): four bytes each, the lowest first; and what
 * a GPU's memory they lie in takes. */
#ifndef PROTO_PAGE_NUMBERS_H
#define PROTO_PAGE_NUMBERS_H

#include <endian.h>
#include <stdint.h>
#include <string.h>

#define PROTO_PAGE_NUMBER_BYTES 4u

#define PROTO_DEVICE_GRANULE ((uint64_t)2 << 20) /* drivers map multiples of it */

/* Of an allocation on a GPU that has room for @bytes, at most 2^63. */
static inline uint64_t proto_device_bytes(uint64_t bytes)
{
	return (bytes + PROTO_DEVICE_GRANULE - 1) / PROTO_DEVICE_GRANULE * PROTO_DEVICE_GRANULE;
}

static inline uint32_t proto_get_page(const uint8_t *bytes, uint32_t i)
{
	uint32_t page;

	memcpy(&page, &bytes[PROTO_PAGE_NUMBER_BYTES * i], sizeof(page));
	return le32toh(page);
}

/* Return: how many bytes they take. */
static inline uint32_t proto_put_pages(uint8_t *ret_bytes, const uint32_t *pages, uint32_t n)
{
	for (uint32_t i = 0; i < n; i++) {
		uint32_t page = htole32(pages[i]);

		memcpy(&ret_bytes[PROTO_PAGE_NUMBER_BYTES * i], &page, sizeof(page));
	}
	return PROTO_PAGE_NUMBER_BYTES * n;
}

#endif
