// SPDX-License-Identifier: MIT
/*
 * space_build.c: from the JSON of a rules file to templates and blocks. A block of a variant is
 *
 *   {"family": "fwd", "pipeline": "qr", "data_types": ["fp16"], "head_dims": "arch",
 *    "when": "arch.trload", "for": [axes], "set": {...}, "rules": [...], "tiles": "forward",
 *    "allow": ["mask"], "receipt": "forward", "only_receipts": [1], "restrict_hdims": false}
 *
 *   pipeline         a word, or a list, or {"config": true, "else": [...]}: the sweep's list as is
 *   data_types       a list, or "arch" for all of the arch's; the sweep's list thins out either
 *   head_dims        a list of pairs or numbers, or "arch": the arch's table of the data type
 *   when             judged before the axes
 *   allow            the lists of the sweep that are honoured, by field
 *   receipt          a table of section "receipts": one more rule, picked by the receipt's number
 *   only_receipts    other receipts do not have this block at all
 *   restrict_hdims   false: the caller's list of head dims is ignored
 */
#include <stdio.h>
#include <stdlib.h>

#include "space_build.h"

struct space_builder {
	struct spec_space *space;
	const struct space_request *request;
	const struct sweep *sweep;
	struct at document;
	struct at named_axes, tiles;
	struct expr_scope scope;
	struct fmha_error *err;
};

/* One block of the document on its way to becoming a template and blocks. */
struct draft {
	struct template *template;
	int family;
	uint64_t data_types;
	struct axis pipelines;
	struct at head_dims; /* item NULL: the arch's table */
	int restrict_hdims;
	struct at generator; /* item NULL: no tiles of its own */
	struct set_list set;
	field_set allow;
};

struct expr_scope space_scope(const struct spec_catalog *catalog, int arch, int arch_space)
{
	const struct arch_space *of = &catalog->archs[arch].spaces[arch_space];

	return (struct expr_scope){
		.catalog = catalog,
		.arch = arch,
		.space = arch_space,
		.define = {cJSON_GetObjectItemCaseSensitive(of->item, "define"),
			   cJSON_GetObjectItemCaseSensitive(of->rules->document, "define")},
	};
}

static const struct arch_space *space_tables(const struct spec_space *space)
{
	return &space->catalog->archs[space->arch].spaces[space->arch_space];
}

static void draft_deinit(struct draft *draft)
{
	axis_deinit(&draft->pipelines);
	set_deinit(&draft->set);
}

static struct template *template_free(struct template *template)
{
	for (int i = 0; i < template->n_axes; i++)
		axis_deinit(&template->axis[i]);
	rules_deinit(&template->rules);
	free(template);
	return NULL;
}

static int is_allowed(const struct sweep *sweep, int field, int32_t value)
{
	const struct allow_list *list = &sweep->allow[field];

	for (int i = 0; i < list->n; i++)
		if (list->value[i] == value)
			return 1;
	return !list->present;
}

static int read_family(struct space_builder *b, const struct at *at, struct draft *draft)
{
	struct at family = at_key(at, "family");
	const char *word;
	int r = at_string(&family, &word, b->err);

	if (r < 0)
		return r;
	draft->family = spec_word_find(b->space->catalog, SPEC_FIELD_family, word);
	return draft->family < 0 ? at_error(&family, b->err, "'%s' is not a family", word) : 0;
}

static int read_data_types(struct space_builder *b, const struct at *at, struct draft *draft)
{
	const struct spec_catalog *catalog = b->space->catalog;
	const struct allow_list *list = &b->sweep->allow[SPEC_FIELD_data_type];
	struct at types = at_key(at, "data_types");
	uint64_t own = space_tables(b->space)->dtypes;
	struct axis axis = {.n_fields = 1, .field = {SPEC_FIELD_data_type}};
	int r = 0;

	if (!cJSON_IsString(types.item) || strcmp(types.item->valuestring, "arch") != 0) {
		r = read_axis_rows(catalog, &types, &axis, b->err);
		for (int i = 0; i < axis.n_values; i++)
			draft->data_types |= (uint64_t)1 << axis.value[i];
		axis_deinit(&axis);
		draft->data_types &= own;
	} else {
		draft->data_types = own;
	}
	/* Unlike every other list of a sweep, an empty one means all. */
	for (int i = 0; i < SPEC_N_DTYPES; i++)
		if (list->n > 0 && !is_allowed(b->sweep, SPEC_FIELD_data_type, i))
			draft->data_types &= ~((uint64_t)1 << i);
	return r;
}

static int read_pipelines(struct space_builder *b, const struct at *at, struct draft *draft)
{
	const struct spec_catalog *catalog = b->space->catalog;
	struct at pipeline = at_key(at, "pipeline");
	struct at otherwise = at_key(&pipeline, "else");
	const struct allow_list *list = &b->sweep->allow[SPEC_FIELD_pipeline];
	struct axis *axis = &draft->pipelines;

	*axis = (struct axis){.n_fields = 1, .field = {SPEC_FIELD_pipeline}};
	if (cJSON_IsArray(pipeline.item))
		return read_axis_rows(catalog, &pipeline, axis, b->err);
	if (cJSON_IsObject(pipeline.item) && !list->present)
		return read_axis_rows(catalog, &otherwise, axis, b->err);
	axis->value = malloc(sizeof(list->value));
	if (!axis->value)
		return no_memory(b->err);
	if (cJSON_IsObject(pipeline.item)) {
		memcpy(axis->value, list->value, sizeof(list->value));
		axis->n_values = list->n;
		return 0;
	}
	axis->n_values = 1;
	return read_value(catalog, &pipeline, SPEC_FIELD_pipeline, axis->value, b->err);
}

/* A list of field names; a missing one is empty. */
static int read_fields(struct space_builder *b, const struct at *list, field_set *ret)
{
	int index = 0;
	int r = list->item ? at_want_array(list, b->err) : 0;

	for (const cJSON *item = r == 0 && list->item ? list->item->child : NULL; item && r == 0;
	     item = item->next) {
		struct at here = at_item(list, item, index++);
		const char *word = "";
		int field;

		r = at_string(&here, &word, b->err);
		field = field_find(word, strlen(word));
		if (r == 0 && field < 0)
			r = at_error(&here, b->err, "there is no field '%s'", word);
		if (r == 0)
			*ret |= (field_set)1 << field;
	}
	return r;
}

/* Drops the values that an honoured list does not allow. */
static void thin_out(const struct sweep *sweep, field_set allow, struct axis *axis)
{
	size_t n_fields = (size_t)axis->n_fields;
	int kept = 0;

	for (int row = 0; row < axis->n_values; row++) {
		int32_t *value = axis->value + (size_t)row * n_fields;
		int keep = 1;

		for (int i = 0; i < axis->n_fields; i++)
			if (allow >> axis->field[i] & 1)
				keep &= is_allowed(sweep, axis->field[i], value[i]);
		if (keep)
			memmove(axis->value + (size_t)kept++ * n_fields, value,
				n_fields * sizeof(*value));
	}
	axis->n_values = kept;
}

/* The receipt's predicate becomes one more rule. */
static int read_receipt(struct space_builder *b, const struct at *at, struct rule_list *rules)
{
	struct at name = at_key(at, "receipt");
	struct at tables = at_key(&b->document, "receipts");
	struct at table, rule;
	char number[16];
	const char *word;
	int r;

	if (!name.item)
		return 0;
	r = at_string(&name, &word, b->err);
	if (r < 0)
		return r;
	table = at_key(&tables, word);
	if (!table.item)
		return at_error(&name, b->err, "there is no table of receipts '%s'", word);
	(void)snprintf(number, sizeof(number), "%d", b->request->receipt);
	rule = at_key(&table, number);
	if (!rule.item)
		rule = at_key(&table, "otherwise");
	if (rules->n == SPACE_MAX_RULES)
		return at_error(&name, b->err, "more than %d rules", SPACE_MAX_RULES);
	r = at_expr(&rule, &b->scope, &rules->rule[rules->n], b->err);
	rules->n += r == 0;
	return r;
}

/* Returns 1 when the receipt has this block, 0 when not. */
static int has_receipt(struct space_builder *b, const struct at *at)
{
	struct at list = at_key(at, "only_receipts");
	int found = 0;

	if (!list.item)
		return 1;
	for (const cJSON *item = list.item->child; item; item = item->next)
		found |= cJSON_IsNumber(item) && item->valueint == b->request->receipt;
	return found;
}

/* Notes what of a signature does not depend on an axis. */
static void note_signature(struct template *t)
{
	struct kernel_spec mark = {0};

	for (int f = 0; f < SPEC_N_FIELDS; f++)
		if (spec_signature_fields & ~t->axis_fields & (field_set)1 << f)
			field_store(&spec_fields[f], &mark, 0xffff);
	memcpy(t->fixed_signature, &mark.signature, sizeof(t->fixed_signature));
}

/* Gives each rule its level and notes what does not depend on an axis. */
static int settle_template(struct space_builder *b, const struct at *at, struct draft *draft)
{
	struct template *t = draft->template;
	int8_t level[SPEC_N_FIELDS];

	memset(level, -1, sizeof(level));
	for (int i = 0; i < t->n_axes; i++) {
		if (t->axis_fields & t->axis[i].bits)
			return at_error(at, b->err, "axis %d sets a field again", i);
		if (!t->axis[i].value)
			return at_error(at, b->err, "warp_tiles is for tile generators");
		t->axis_fields |= t->axis[i].bits;
		for (int f = 0; f < SPEC_N_FIELDS; f++)
			if (t->axis[i].bits >> f & 1)
				level[f] = (int8_t)i;
	}
	/* A generator may set block_per_cu too, when no axis does. */
	for (int f = 0; f < SPEC_N_FIELDS && draft->generator.item; f++)
		if ((spec_tile_fields | FIELD_BIT(block_per_cu)) & ~t->axis_fields &
		    (field_set)1 << f)
			level[f] = (int8_t)t->n_axes;
	if (draft->generator.item && (t->axis_fields & spec_tile_fields))
		return at_error(at, b->err, "the tile comes from an axis and from a generator");
	rules_set_levels(&t->rules, level);
	for (int i = 0; i < t->rules.n; i++)
		t->n_leaf_rules += t->rules.level[i] == t->n_axes;
	note_signature(t);
	return 0;
}

static int read_template(struct space_builder *b, const struct at *at, struct draft *draft)
{
	const struct spec_catalog *catalog = b->space->catalog;
	struct template *t = draft->template;
	struct at axes = at_key(at, "for"), rules = at_key(at, "rules"), when = at_key(at, "when"),
		  set = at_key(at, "set");
	int r = 0;

	if (axes.item)
		r = read_axes(catalog, &axes, &b->named_axes, b->sweep, t->axis, &t->n_axes,
			      b->err);
	for (int i = 0; i < t->n_axes && r == 0; i++)
		thin_out(b->sweep, draft->allow, &t->axis[i]);
	if (r == 0 && when.item) {
		r = at_expr(&when, &b->scope, &t->rules.rule[0], b->err);
		t->rules.n = r == 0;
	}
	if (r == 0)
		r = read_rules(&rules, &b->scope, &t->rules, b->err);
	if (r == 0)
		r = read_receipt(b, at, &t->rules);
	if (r == 0)
		r = read_set(&set, &b->scope, &draft->set, b->err);
	return r < 0 ? r : settle_template(b, at, draft);
}

static int read_generator_name(struct space_builder *b, const struct at *at, struct draft *draft)
{
	struct at name = at_key(at, "tiles");
	const char *word;
	int r;

	if (!name.item)
		return 0;
	r = at_string(&name, &word, b->err);
	if (r < 0)
		return r;
	draft->generator = at_key(&b->tiles, word);
	return draft->generator.item ? 0 : at_error(&name, b->err, "there are no tiles '%s'", word);
}

/* An empty one; NULL: out of memory. */
static struct tile_list *new_tile_list(struct spec_space *space)
{
	size_t n_lists = space->n_tile_lists + 1;
	/* NOLINTNEXTLINE(bugprone-sizeof-expression): a list of pointers */
	struct tile_list **grown = realloc(space->tile_lists, n_lists * sizeof(*grown));
	struct tile_list *list = grown ? calloc(1, sizeof(*list)) : NULL;

	if (grown)
		space->tile_lists = grown;
	if (list)
		grown[space->n_tile_lists++] = list;
	return list;
}

/* The list of tiles for @base, made when it is the first of its kind. */
static int find_tiles(struct space_builder *b, const struct at *generator,
		      const struct kernel_spec *base, const struct tile_list **ret,
		      struct fmha_error *err)
{
	struct spec_space *space = b->space;
	struct tile_list *list;
	int r;

	for (size_t i = 0; i < space->n_tile_lists; i++) {
		list = space->tile_lists[i];
		if (list->generator == generator->item && list->pipeline == base->pipeline &&
		    list->data_type == base->signature.data_type &&
		    list->hdim_q == base->signature.hdim_q &&
		    list->hdim_v == base->signature.hdim_v) {
			*ret = list;
			return 0;
		}
	}
	list = new_tile_list(space);
	if (!list)
		return no_memory(err);
	list->generator = generator->item;
	list->pipeline = base->pipeline;
	list->data_type = base->signature.data_type;
	list->hdim_q = base->signature.hdim_q;
	list->hdim_v = base->signature.hdim_v;
	r = tiles_generate(&b->scope, generator, &b->named_axes, base, list, err);
	*ret = list;
	return r;
}

static int keep_block(struct spec_space *space, const struct block *block, struct fmha_error *err)
{
	if ((space->n_blocks & (space->n_blocks - 1)) == 0) {
		size_t n = space->n_blocks ? 2 * space->n_blocks : 1;
		struct block *grown = realloc(space->blocks, n * sizeof(*grown));

		if (!grown)
			return no_memory(err);
		space->blocks = grown;
	}
	space->blocks[space->n_blocks++] = *block;
	return 0;
}

static int add_block(struct space_builder *b, struct draft *draft, const struct kernel_spec *base)
{
	struct block block = {.template = draft->template, .base = *base, .n_tiles = 1};
	const struct tile_list *list = NULL;
	int r = 0;

	if (draft->generator.item) {
		r = find_tiles(b, &draft->generator, base, &list, b->err);
		if (r < 0 || !list || list->n == 0)
			return r;
		block.tile = list->tile;
		block.n_tiles = list->n;
	}
	return keep_block(b->space, &block, b->err);
}

int space_is_restricted(const struct space_request *request, int hdim_q, int hdim_v)
{
	if (!request->restrict_hdims)
		return 0;
	for (size_t i = 0; i < request->n_restrict_hdims; i++)
		if (request->restrict_hdims[i].hdim_q == hdim_q &&
		    request->restrict_hdims[i].hdim_v == hdim_v)
			return 0;
	return 1;
}

/* One data type and head-dim pair: a block for each pipeline. */
static int add_blocks(struct space_builder *b, struct draft *draft, struct kernel_spec *spec)
{
	const struct template *t = draft->template;
	int r = 0;

	if (draft->restrict_hdims &&
	    space_is_restricted(b->request, spec->signature.hdim_q, spec->signature.hdim_v))
		return 0;
	for (int i = 0; i < draft->pipelines.n_values && r == 0; i++) {
		struct kernel_spec base = *spec;
		int keep = 1;

		base.pipeline = (uint8_t)draft->pipelines.value[i];
		set_apply(&draft->set, &base);
		for (int f = 0; f < SPEC_N_FIELDS; f++)
			if (draft->allow & ~t->axis_fields & (field_set)1 << f)
				keep &= is_allowed(b->sweep, f, field_load(&spec_fields[f], &base));
		if (keep && rules_hold(&t->rules, -1, &base))
			r = add_block(b, draft, &base);
	}
	return r;
}

/* Calls add_blocks() for each pair of @pairs: [q, v], or a number that stands for both. */
static int each_pair(struct space_builder *b, struct draft *draft, const struct at *pairs,
		     struct kernel_spec *spec)
{
	int index = 0;
	int r = at_want_array(pairs, b->err);

	for (const cJSON *item = r == 0 ? pairs->item->child : NULL; item && r == 0;
	     item = item->next) {
		struct at here = at_item(pairs, item, index++);
		int is_pair = cJSON_IsArray(item) && cJSON_GetArraySize(item) == 2;
		struct at q = is_pair ? at_item(&here, cJSON_GetArrayItem(item, 0), 0) : here;
		struct at v = is_pair ? at_item(&here, cJSON_GetArrayItem(item, 1), 1) : here;
		int64_t hdim_q = 0, hdim_v = 0;

		r = at_int(&q, 1, UINT16_MAX, &hdim_q, b->err);
		if (r == 0)
			r = at_int(&v, 1, UINT16_MAX, &hdim_v, b->err);
		if (r < 0)
			return r;
		spec->signature.hdim_q = (uint16_t)hdim_q;
		spec->signature.hdim_v = (uint16_t)hdim_v;
		r = add_blocks(b, draft, spec);
	}
	return r;
}

static int instantiate(struct space_builder *b, struct draft *draft)
{
	const struct spec_catalog *catalog = b->space->catalog;
	struct arch_place place;
	struct at table;
	int r = 0;

	arch_place_init(&place, catalog, b->space->arch, b->space->arch_space);
	table = at_key(&place.space, "head_dims");
	for (int dtype = 0; dtype < SPEC_N_DTYPES && r == 0; dtype++) {
		struct at pairs = draft->head_dims;
		struct kernel_spec spec;

		if (!(draft->data_types >> dtype & 1))
			continue;
		if (!pairs.item) {
			pairs = at_key(&table, spec_word(catalog, SPEC_FIELD_data_type, dtype));
			if (!pairs.item)
				continue; /* listed for the arch, but without kernels: fp8fp16 */
		}
		spec_init(&spec);
		spec.signature.family = (uint8_t)draft->family;
		spec.signature.data_type = (uint8_t)dtype;
		spec.gfx_arch = (uint8_t)b->space->arch;
		r = each_pair(b, draft, &pairs, &spec);
	}
	return r;
}

/* @template: taken, NULL: out of memory. */
static int keep_template(struct spec_space *space, struct template *template,
			 struct fmha_error *err)
{
	struct template **grown;

	if (!template)
		return no_memory(err);
	/* NOLINTNEXTLINE(bugprone-sizeof-expression): a list of pointers */
	grown = realloc(space->templates, (space->n_templates + 1) * sizeof(*grown));
	if (!grown) {
		template_free(template);
		return no_memory(err);
	}
	space->templates = grown;
	grown[space->n_templates++] = template;
	return 0;
}

static int read_block(struct space_builder *b, const struct at *at, struct draft *draft)
{
	struct at allow = at_key(at, "allow");
	int r;

	if (cJSON_IsString(draft->head_dims.item) &&
	    strcmp(draft->head_dims.item->valuestring, "arch") == 0) {
		draft->head_dims.item = NULL;
	} else {
		r = at_want_array(&draft->head_dims, b->err);
		if (r < 0)
			return r;
	}
	r = read_generator_name(b, at, draft);
	if (r < 0)
		return r;
	r = read_family(b, at, draft);
	if (r < 0)
		return r;
	r = read_data_types(b, at, draft);
	if (r < 0)
		return r;
	r = read_pipelines(b, at, draft);
	if (r < 0)
		return r;
	r = read_fields(b, &allow, &draft->allow);
	return r < 0 ? r : read_template(b, at, draft);
}

static int build_block(struct space_builder *b, const struct at *at)
{
	static const char *const keys[] = {
		"family",  "pipeline",      "data_types",     "head_dims", "when",
		"for",     "set",           "rules",          "tiles",     "allow",
		"receipt", "only_receipts", "restrict_hdims", NULL};
	struct at restricted = at_key(at, "restrict_hdims");
	struct draft draft = {.head_dims = at_key(at, "head_dims"),
			      .restrict_hdims = !cJSON_IsFalse(restricted.item)};
	int r = at_object(at, keys, b->err);

	if (r < 0)
		return r;
	if (!has_receipt(b, at) && !b->request->check_only)
		return 0;
	draft.template = calloc(1, sizeof(*draft.template));
	if (!draft.template)
		return no_memory(b->err);
	r = read_block(b, at, &draft);
	if (r < 0) {
		template_free(draft.template);
	} else {
		r = keep_template(b->space, draft.template, b->err);
		if (r == 0 && !b->request->check_only)
			r = instantiate(b, &draft);
	}
	draft_deinit(&draft);
	return r;
}

static int build_variant(struct space_builder *b, const struct at *blocks)
{
	int index = 0;
	int r = at_want_array(blocks, b->err);

	for (const cJSON *item = r == 0 ? blocks->item->child : NULL; item && r == 0;
	     item = item->next) {
		struct at here = at_item(blocks, item, index++);

		r = build_block(b, &here);
	}
	return r;
}

static struct space_builder builder_make(struct spec_space *space,
					 const struct space_request *request,
					 const struct sweep *sweep, struct fmha_error *err)
{
	const struct rules *rules = space_tables(space)->rules;

	return (struct space_builder){
		.space = space,
		.request = request,
		.sweep = sweep,
		.document = at_document(rules->document, rules->path),
		.scope = space_scope(space->catalog, space->arch, space->arch_space),
		.err = err,
	};
}

int space_add_variant(struct spec_space *space, const struct space_request *request,
		      const struct sweep *sweep, struct fmha_error *err)
{
	struct space_builder b = builder_make(space, request, sweep, err);
	struct at variants = at_key(&b.document, "variants");
	struct at exhaustive = at_key(&b.document, "exhaustive");
	struct at blocks = at_key(&variants, sweep->variant);

	b.named_axes = at_key(&b.document, "axes");
	b.tiles = at_key(&b.document, "tiles");
	if (request->exhaustive) {
		struct at own = at_key(&exhaustive, sweep->variant);

		/* A variant without blocks of its own there is the same in both modes. */
		if (own.item)
			blocks = own;
	}
	return blocks.item ? build_variant(&b, &blocks) : 1;
}

int space_read_families(struct spec_space *space, struct fmha_error *err)
{
	struct space_builder b = builder_make(space, NULL, NULL, err);
	struct at families = at_key(&b.document, "families");
	int r = at_want_object(&families, err);

	for (const cJSON *item = r == 0 ? families.item->child : NULL; item && r == 0;
	     item = item->next) {
		struct at here = at_member(&families, item);
		struct at traits = at_key(&here, "traits"), fixed = at_key(&here, "fixed");
		int family = spec_word_find(space->catalog, SPEC_FIELD_family, item->string);
		struct draft draft = {0};

		if (family < 0)
			return at_error(&here, err, "'%s' is not a family", item->string);
		r = at_object(&here, (const char *const[]){"traits", "fixed", NULL}, err);

		if (r == 0)
			r = read_fields(&b, &traits, &draft.allow);
		if (r == 0)
			r = read_set(&fixed, &b.scope, &space->families[family].fixed, err);
		space->families[family].used = draft.allow & spec_signature_fields;
	}
	return r;
}

int space_check(const struct spec_catalog *catalog, int arch, int arch_space,
		struct fmha_error *err)
{
	const struct rules *rules = catalog->archs[arch].spaces[arch_space].rules;
	struct at document = at_document(rules->document, rules->path);
	const struct space_request request = {.check_only = 1};
	struct spec_space *space = calloc(1, sizeof(*space));
	struct sweep *sweep = calloc(1, sizeof(*sweep));
	int r;

	if (!space || !sweep) {
		free(space);
		free(sweep);
		return no_memory(err);
	}
	space->catalog = catalog;
	space->arch = arch;
	space->arch_space = arch_space;
	r = space_read_families(space, err);
	for (int i = 0; i < 2 && r == 0; i++) {
		struct at section = at_key(&document, i ? "exhaustive" : "variants");
		struct space_builder b = builder_make(space, &request, sweep, err);

		b.named_axes = at_key(&b.document, "axes");
		b.tiles = at_key(&b.document, "tiles");
		r = at_want_object(&section, err);
		for (const cJSON *item = r == 0 ? section.item->child : NULL; item && r == 0;
		     item = item->next) {
			struct at here = at_member(&section, item);

			r = build_variant(&b, &here);
		}
	}
	free(sweep);
	spec_space_free(space);
	return r;
}

struct spec_space *spec_space_free(struct spec_space *space)
{
	if (!space)
		return NULL;
	for (size_t i = 0; i < space->n_templates; i++) {
		for (int j = 0; j < space->templates[i]->n_axes; j++)
			axis_deinit(&space->templates[i]->axis[j]);
		rules_deinit(&space->templates[i]->rules);
		free(space->templates[i]);
	}
	for (size_t i = 0; i < space->n_tile_lists; i++) {
		free(space->tile_lists[i]->tile);
		free(space->tile_lists[i]);
	}
	for (int i = 0; i < SPEC_N_FAMILIES; i++)
		set_deinit(&space->families[i].fixed);
	free(space->own);
	free(space->templates);
	free(space->tile_lists);
	free(space->blocks);
	free(space);
	return NULL;
}
