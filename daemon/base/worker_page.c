/* SPDX-License-Identifier: MIT */
#include <base/worker_page.h>

#include <string.h>

void worker_page_set_config(struct worker_page *page, const struct config *config)
{
	atomic_fetch_add(&page->config_version, 1);
	atomic_thread_fence(memory_order_seq_cst);
	page->config = *config;
	atomic_thread_fence(memory_order_seq_cst);
	atomic_fetch_add(&page->config_version, 1);
}

void worker_page_get_config(struct worker_page *page, struct config *ret_config)
{
	unsigned int version;

	do {
		version = atomic_load(&page->config_version);
		atomic_thread_fence(memory_order_seq_cst);
		memcpy(ret_config, &page->config, sizeof(*ret_config));
		atomic_thread_fence(memory_order_seq_cst);
	} while (version % 2 != 0 || version != atomic_load(&page->config_version));
}

void worker_page_set_quarantine(struct worker_page *page, const struct worker_quarantine *what)
{
	uint32_t version = atomic_load(&page->quarantine_version) + 1;

	page->quarantine[version % 2] = *what;
	atomic_store(&page->quarantine_version, version);
}

/*
 * Who reads has the list to itself unless the front writes twice meanwhile, and looks again then. A front that
 * dies while it writes leaves the list before.
 */
uint32_t worker_page_get_quarantine(const struct worker_page *page,
				    struct worker_quarantine *ret_what)
{
	uint32_t version;

	do {
		version = atomic_load(&page->quarantine_version);
		*ret_what = page->quarantine[version % 2];
		atomic_thread_fence(memory_order_seq_cst);
	} while (version != atomic_load(&page->quarantine_version));
	return version;
}
