/* SPDX-License-Identifier: MIT */
/*
 * list.h: circular doubly linked lists inside the structs they link. An unlinked node points at
 * itself, so list_remove() may be called on any initialised node.
 */
#ifndef FMHAD_BASE_LIST_H
#define FMHAD_BASE_LIST_H

#include <stdbool.h>
#include <stddef.h>

struct list {
	struct list *next, *prev;
};

#define container_of(pointer, type, member) ((type *)((char *)(pointer)-offsetof(type, member)))

/* The body may remove @node itself, not its successor. */
#define list_for_each(node, head)                                                                  \
	for (struct list *node = (head)->next, *node##_next = node->next; node != (head);          \
	     node = node##_next, node##_next = node->next)

/* The same over the structs of @type that are linked by their @member. */
#define list_for_each_entry(type, item, head, member)                                              \
	for (type *item = container_of((head)->next, type, member),                                \
		  *item##_next = container_of(item->member.next, type, member);                    \
	     &item->member != (head);                                                              \
	     item = item##_next, item##_next = container_of(item->member.next, type, member))

static inline void list_init(struct list *node)
{
	node->next = node->prev = node;
}

static inline bool list_is_empty(const struct list *head)
{
	return head->next == head;
}

static inline void list_append(struct list *head, struct list *node)
{
	node->prev = head->prev;
	node->next = head;
	head->prev->next = node;
	head->prev = node;
}

static inline void list_prepend(struct list *head, struct list *node)
{
	list_append(head->next, node);
}

static inline void list_remove(struct list *node)
{
	node->prev->next = node->next;
	node->next->prev = node->prev;
	list_init(node);
}

static inline struct list *list_pop(struct list *head)
{
	struct list *node = head->next;

	if (node == head)
		return NULL;
	list_remove(node);
	return node;
}

#endif
