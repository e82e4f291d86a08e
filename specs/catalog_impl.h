/* SPDX-License-Identifier: MIT */
/* catalog_impl.h: the catalog as the files of this folder see it. */
#ifndef SPECS_CATALOG_IMPL_H
#define SPECS_CATALOG_IMPL_H

#include <cjson/cJSON.h>

#include <proto/error.h>
#include <specs/backend.h>
#include <specs/catalog.h>
#include <specs/validate.h>

#include "expr.h"
#include "fields.h"
#include "json.h"

#define CATALOG_MAX_WORDS      64
#define CATALOG_MAX_ARCHS      64
#define CATALOG_MAX_RULES      8
#define CATALOG_MAX_SPACES     4 /* of one arch */
#define CATALOG_MAX_PROFILES   32
#define CATALOG_MAX_PROPERTIES 16

struct words {
	int n;
	char *word[CATALOG_MAX_WORDS];
};

/* Section "validate" of a rules file, compiled for one arch. */
struct check {
	struct expr when;    /* empty: always */
	struct expr require; /* a spec for which this is false is reported */
	const char *field;   /* inside the rules' document */
	const char *message; /* with {field} place holders */
	uint16_t families;   /* bit n: family n */
	uint8_t is_warning;
};

/* One file of rules/: how the kernel space of some archs is built. The document is interpreted by
 * space.c whenever a space is made; only its checks are compiled beforehand. */
struct rules {
	const char *name;
	char *path;
	cJSON *document;
};

/* One member of an arch's "spaces": a rules file and the tables that it asks for. */
struct arch_space {
	const struct rules *rules;
	const cJSON *item;
	uint16_t dtypes;    /* bit n: enum spec_dtype n */
	uint64_t pipelines; /* bit n: word n */
	/* The properties of each data type as this arch has them: `dtype.<property>` in rules. The
	 * catalog's come first, then first_warp_m, _n, _k: the first of the arch's warp tiles. */
	int32_t dtype_properties[SPEC_N_DTYPES][CATALOG_MAX_PROPERTIES];
	struct check *checks;
	int n_checks;
};

/* The space that a backend of this build has for an arch. */
struct own_space {
	const struct spec_backend *backend; /* NULL: none */
	const struct spec_backend_arch *model;
	int first_pipeline;
	uint64_t pipelines; /* bit n: word n */
};

struct arch {
	char *path; /* NULL, and no document: only a backend knows it */
	cJSON *document;
	struct own_space own;
	int n_spaces;
	struct arch_space spaces[CATALOG_MAX_SPACES];
};

/* Where an arch_space stands in its file. Its places point at each other: do not copy it. */
struct arch_place {
	struct at document, list, space;
};

struct profile {
	const char *name;
	const char *text;
	int receipt;    /* -1: none */
	int kernels_of; /* the receipt whose kernels it keeps some of; -1: the default's */
	int all_types;
	struct expr keep;
};

/* The rules of kernels that are not this build's. */
struct catalog_foreign {
	int (*judge)(const struct spec_catalog *catalog, const struct kernel_spec *spec,
		     struct spec_findings *ret_findings); /* as spec_validate() */
	void (*release)(struct spec_catalog *catalog);
};

struct spec_catalog {
	const struct catalog_foreign *foreign; /* NULL: only this build's own are */
	char *dir;
	struct words pipelines, tile_tags, properties; /* pipelines: the backends' come last */
	const struct spec_pipeline *own_pipelines[CATALOG_MAX_WORDS]; /* by word; NULL: of rules/ */
	int n_archs, n_rules, n_profiles;
	const char *arch_names[CATALOG_MAX_ARCHS];
	struct arch archs[CATALOG_MAX_ARCHS];
	struct rules rules[CATALOG_MAX_RULES];
	struct profile profiles[CATALOG_MAX_PROFILES];
	cJSON *words_document, *profiles_document;
	int dtype_bytes[SPEC_N_DTYPES];
};

static inline int no_memory(struct fmha_error *err)
{
	return fmha_error_set(err, FMHA_ENOMEM, "specs: out of memory");
}

/* The vocabulary of a field: NULL and 0 when it has none. */
const char *const *spec_words(const struct spec_catalog *catalog, enum spec_field field,
			      int *ret_n);
int spec_word_find_n(const struct spec_catalog *catalog, enum spec_field field, const char *word,
		     size_t length);

/* spec.c: the word that is meant by another one, NULL: there is none. */
const char *spec_synonym(int field, const char *said, size_t length);

/* catalog.c */
int catalog_append_word(struct words *words, const char *word, struct fmha_error *err);
/* Archs are numbered anew, in the order of their names. */
int catalog_add_backends(struct spec_catalog *catalog, const struct spec_backend *const *backends,
			 struct fmha_error *err);

/* validate.c: one more finding, *@ret NULL where there is no room for it; and its sentence, with the values of
 * {fields} filled in. */
void findings_add(struct spec_findings *findings, int is_warning, const char *field,
		  struct spec_finding **ret);
void findings_write(const struct spec_catalog *catalog, const struct kernel_spec *spec,
		    const char *message, char *text, size_t size);

/* ck/catalog_arch.c: an arch's document, whose file is read and whose name is known, and its spaces.
 */
int catalog_load_arch(struct spec_catalog *catalog, int arch_number, struct fmha_error *err);
void arch_place_init(struct arch_place *place, const struct spec_catalog *catalog, int arch,
		     int space);

/* traits.c. By number: which families have it, how many values it takes, where struct traits has it. */
struct trait_info {
	uint16_t families;
	uint8_t n_values, at;
};
extern const struct trait_info trait_infos[N_TRAITS];
static inline uint8_t trait_get(const struct traits *traits, int trait)
{
	return ((const uint8_t *)traits)[trait_infos[trait].at];
}
static inline void trait_set(struct traits *traits, int trait, uint8_t value)
{
	((uint8_t *)traits)[trait_infos[trait].at] = value;
}
/* Kernels without scores take head dims as they come, and have the largest in their names. */
static inline int family_takes_any_dims(int family)
{
	return !(TRAITS_SCORES >> family & 1);
}
/* The fields by which specs say those of @set; writes them. */
field_set fields_of_traits(uint32_t set);
void signature_set_traits(struct kernel_signature *signature, uint32_t set,
			  const struct traits *traits);
/* Types for which code is the same are one. */
uint8_t data_type_of_code(uint8_t data_type);

/* backend.c. Whether a variant of that name has kernels; fields that no row has of which @spec is a kernel; the
 * kernel of that row with another signature, 0: it is of none; a signature less what is no matter to code. */
int backend_has_variant(const char *variant);
field_set backend_absent(const struct own_space *own, const struct kernel_spec *spec);
int backend_recut(const struct own_space *own, struct kernel_spec *spec,
		  const struct kernel_signature *signature);
void backend_reduce(const struct spec_backend *backend, struct kernel_signature *signature);
/* NULL, or why a backend has no such kernel: a sentence whose subject is a field, with
 * place holders. */
const char *backend_judge(const struct spec_catalog *catalog, const struct kernel_spec *spec,
			  enum spec_field *ret_field);

/*
 * name.c: the parts of a name in which it has a mode, as this build's own kernels once had. @ret_fields: that each
 * of them tells; -1: several.
 * Return: how many.
 */
#define NAME_MOST_PARTS 32
int name_parts(int ret_fields[NAME_MOST_PARTS]);
void name_part(const struct spec_catalog *catalog, const struct kernel_spec *spec, int part,
	       char text[SPEC_NAME_BYTES]);

/* Compiles the expression at @at, a string; complaints name the place in the document. */
int at_expr(const struct at *at, const struct expr_scope *scope, struct expr *ret,
	    struct fmha_error *err);

#endif
