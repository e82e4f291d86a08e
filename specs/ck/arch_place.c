// SPDX-License-Identifier: MIT
/* arch_place.c: where in its file one of an arch's spaces stands. */
#include "catalog_impl.h"

void arch_place_init(struct arch_place *place, const struct spec_catalog *catalog, int arch,
		     int space)
{
	const struct arch *of = &catalog->archs[arch];

	place->document = at_document(of->document, of->path);
	place->list = at_key(&place->document, "spaces");
	place->space = at_item(&place->list, of->spaces[space].item, space);
}
