/* SPDX-License-Identifier: MIT */
/*
 * flat.h: a shortcut past msgpack-c's unpacker for the messages that make up nearly all traffic.
 *
 * ping, run, the releases and their answers are an envelope around a map of a few short keys with
 * numbers below: the tree that the unpacker would build is known beforehand. flat_decode() fills in
 * the same objects in one pass over the bytes, without a zone and without the pre-check, since it
 * bounds what it reads itself. What it does not take, be it larger, nested, of another type or
 * broken, goes the long way and is judged there; what it takes, both ways take alike.
 */
#ifndef PROTO_FLAT_H
#define PROTO_FLAT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <proto/message.h>

/* Fills in type, id, method and body of a fresh @message. Return: whether it was one of these. */
bool flat_decode(struct proto_message *message, const uint8_t *payload, size_t n);

/* The long way, for every message. Return: as proto_message_decode(). */
int tree_decode(struct proto_message *message, const uint8_t *payload, size_t n,
		struct fmha_error *err);

#endif
