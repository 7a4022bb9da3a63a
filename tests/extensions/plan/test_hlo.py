"""What moves between chips is read off the compiler's own text."""

import pytest

from grpojax.extensions.plan.hlo import Collective, Traffic, analyse, by_kind

GIB = 2**30

HLO = """
HloModule jit_f

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%first_half (p: bf16[8]) -> bf16[64] {
  %p.1 = bf16[8]{0} parameter(0)
  ROOT %ag.1 = bf16[64]{0:T(8,128)(2,1)S(1)} all-gather(%p.1), channel_id=7, metadata={op_name="f/w"}
}

%second_half (p: bf16[8]) -> bf16[64] {
  %p.2 = bf16[8]{0} parameter(0)
  ROOT %ag.2 = bf16[64]{0} all-gather(%p.2), channel_id=7, metadata={op_name="f/w"}
}

%known_body (t: (s32[], f32[4])) -> (s32[], f32[4]) {
  %t = (s32[]{:T(128)}, f32[4]{0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %x = f32[4]{0} get-tuple-element(%t), index=1
  %two = s32[] constant(2)
  %next = s32[]{:T(128)} add(%i, %two), metadata={op_name="while/add"}
  %start = (f32[4]{0}, f32[4]{0}, u32[]{:S(2)}) collective-permute-start(%x), channel_id=1
  %done = f32[4]{0} collective-permute-done(%start)
  ROOT %out = (s32[], f32[4]{0}) tuple(%next, %done)
}

%known_test (t: (s32[], f32[4])) -> pred[] {
  %end = s32[] constant(12)
  %t.1 = (s32[], f32[4]{0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%t.1), index=0
  ROOT %less = pred[] compare(%i.1, %end), direction=LT
}

%unknown_body (s: (s32[], f32[4], pred[])) -> (s32[], f32[4], pred[]) {
  %s = (s32[], f32[4]{0}, pred[]) parameter(0)
  %inner = (s32[], f32[4]{0}) while(%s), condition=%known_test, body=%known_body
  ROOT %s.2 = (s32[], f32[4]{0}, pred[]) tuple(%inner)
}

%unknown_test (s: (s32[], f32[4], pred[])) -> pred[] {
  %s.3 = (s32[], f32[4]{0}, pred[]) parameter(0)
  %go = pred[] get-tuple-element(%s.3), index=2
  ROOT %any = pred[] all-reduce(%go), channel_id=9, to_apply=%add
}

ENTRY %main (p: bf16[8], q: f32[4]) -> f32[4] {
  %p = bf16[8]{0} parameter(0)
  %one = bf16[64]{0} fusion(%p), kind=kCustom, calls=%first_half
  %other = bf16[64]{0} fusion(%one), kind=kCustom, calls=%second_half
  %r.1 = (f32[4]{0}, f32[2,3]{1,0}) all-reduce(%q, %z), channel_id=1, to_apply=%add
  %r.2 = f32[4]{0} all-reduce(%q), channel_id=1, to_apply=%add
  %loop = (s32[], f32[4]{0}) while(%r.1), condition=%known_test, body=%known_body
  ROOT %last = (s32[], f32[4]{0}, pred[]) while(%loop), condition=%unknown_test, body=%unknown_body
}
"""


def test_collectives_are_counted_as_often_as_they_run():
    once, each = by_kind(analyse(HLO).collectives)
    assert once == {
        "all-gather": Traffic(1, 128 / GIB, 128 / GIB),  # in two fusions, to overlap with both
        "all-reduce": Traffic(2, (40 + 16) / GIB, 40 / GIB),
        "collective-permute": Traffic(6, 6 * 16 / GIB, 16 / GIB),  # 0, 2, ..., 10
    }
    assert each == {
        "all-reduce": Traffic(1, 1 / GIB, 1 / GIB),
        "collective-permute": Traffic(6, 6 * 16 / GIB, 16 / GIB),
    }


def test_a_length_that_xla_wrote_down_is_known():
    """A CPU's comparison may stand in a fusion."""
    hidden = HLO.replace("compare(%i.1, %end), direction=LT", "custom-call(%i.1, %end)")
    written = 'body=%known_body, backend_config={"known_init_step":{"step":"2"},"known_trip_count":{"n":"6"}}'
    assert by_kind(analyse(hidden).collectives) != by_kind(analyse(HLO).collectives)
    found = analyse(hidden.replace("body=%known_body", written)).collectives
    assert by_kind(found) == by_kind(analyse(HLO).collectives)


MEMORY = """
HloModule jit_g, num_partitions=4

%layer (w: bf16[3,64,8], i: s32[]) -> bf16[64,8] {
  %w = bf16[3,64,8]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %one = bf16[1,64,8]{2,1,0} dynamic-slice(%w, %i, %zero, %zero), dynamic_slice_sizes={1,64,8}
  ROOT %flat = bf16[64,8]{1,0} bitcast(%one)
}

%product (x: bf16[4,64], w: bf16[3,64,8], i: s32[]) -> bf16[4,8] {
  %x = bf16[4,64]{1,0:T(8,128)S(1)} parameter(0)
  %w.1 = bf16[3,64,8]{2,1,0} parameter(1)
  %i.1 = s32[] parameter(2)
  %mine = bf16[64,8]{1,0} fusion(%w.1, %i.1), kind=kLoop, calls=%layer
  ROOT %y = bf16[4,8]{1,0:S(1)} convolution(%x, %mine), dim_labels=bf_io->bf
}

%put (cache: bf16[3,4,16], new: bf16[1,4,1], i: s32[]) -> bf16[3,4,16] {
  %cache = bf16[3,4,16]{2,1,0} parameter(0)
  %new = bf16[1,4,1]{2,1,0:S(1)} parameter(1)
  %i.2 = s32[] parameter(2)
  ROOT %updated = bf16[3,4,16]{2,1,0} dynamic-update-slice(%cache, %new, %i.2, %i.2, %i.2)
}

%body (t: (s32[], bf16[3,4,16])) -> (s32[], bf16[3,4,16]) {
  %t = (s32[], bf16[3,4,16]{2,1,0}) parameter(0)
  %n = s32[] get-tuple-element(%t), index=0
  %c = bf16[3,4,16]{2,1,0} get-tuple-element(%t), index=1
  %by = s32[] constant(1)
  %next = s32[]{:S(6)} add(%n, %by)
  %v = bf16[1,4,1]{2,1,0:S(1)} copy(%c2)
  %c.1 = bf16[3,4,16]{2,1,0} fusion(%c, %v, %n), kind=kLoop, calls=%put
  ROOT %out = (s32[], bf16[3,4,16]{2,1,0}) tuple(%next, %c.1)
}

%test (t: (s32[], bf16[3,4,16])) -> pred[] {
  %t.2 = (s32[], bf16[3,4,16]{2,1,0}) parameter(0)
  %n.2 = s32[] get-tuple-element(%t.2), index=0
  %end = s32[] constant(5)
  ROOT %less = pred[]{:S(6)} compare(%n.2, %end), direction=LT
}

ENTRY %main (x: bf16[4,64], w: bf16[3,64,8], cache: bf16[3,4,16]) -> bf16[4,8] {
  %x.2 = bf16[4,64]{1,0:S(1)} parameter(0)
  %w.2 = bf16[3,64,8]{2,1,0} parameter(1)
  %k = bf16[3,4,16]{2,1,0} parameter(2)
  %start = (s32[], bf16[3,4,16]{2,1,0}) tuple(%k, %k)
  %loop = (s32[], bf16[3,4,16]{2,1,0}) while(%start), condition=%test, body=%body
  %f = bf16[4,8]{1,0:S(1)} fusion(%x.2, %w.2, %k), kind=kOutput, calls=%product
  %g = bf16[16,8]{1,0} all-gather(%f), channel_id=1, replica_groups=[1,4]<=[4], dimensions={0}
  ROOT %h = bf16[4,8]{1,0:S(1)} copy(%f)
}
"""


def test_memory_is_counted_by_what_is_read_and_written():
    """A layer of stacked weights, one column of a cache that is updated in place, and nothing of fast memory."""
    found = analyse(MEMORY)
    layer, column, gathered, scalar = 64 * 8 * 2, 4 * 2, 16 * 8 * 2, 4
    # In each of five iterations a column is written into the cache, whose place is read; the counter is added to, and
    # compared with the end.
    each = (column + scalar) + 2 * scalar + 2 * scalar
    assert found.once == (layer + scalar) + gathered + 5 * each
    assert found.each == 0


SCOPED = """
HloModule jit_h

%block (t: (s32[], f32[6,8])) -> (s32[], f32[6,8]) {
  %t = (s32[]{:S(6)}, f32[6,8]{1,0}) parameter(0)
  %n = s32[]{:S(6)} get-tuple-element(%t), index=0
  %x = f32[6,8]{1,0} get-tuple-element(%t), index=1
  %one = f32[1,8]{1,0:S(1)} dynamic-slice(%x, %n, %n), dynamic_slice_sizes={1,8}
  ROOT %out = (s32[]{:S(6)}, f32[6,8]{1,0}) tuple(%n, %x)
}

%token (t: (s32[], f32[6,8])) -> (s32[], f32[6,8]) {
  %t.1 = (s32[]{:S(6)}, f32[6,8]{1,0}) parameter(0)
  %x.1 = f32[6,8]{1,0} get-tuple-element(%t.1), index=1
  %all = f32[6,8]{1,0:S(1)} copy(%x.1)
  ROOT %loop = (s32[]{:S(6)}, f32[6,8]{1,0}) while(%t.1), condition=%test, body=%block, metadata={op_name="f/my/while"}
}

%test (t: (s32[], f32[6,8])) -> pred[] {
  %t.2 = (s32[]{:S(6)}, f32[6,8]{1,0}) parameter(0)
  ROOT %go = pred[]{:S(6)} custom-call()
}

ENTRY %main (t: (s32[], f32[6,8])) -> (s32[], f32[6,8]) {
  %t.3 = (s32[]{:S(6)}, f32[6,8]{1,0}) parameter(0)
  ROOT %tokens = (s32[]{:S(6)}, f32[6,8]{1,0}) while(%t.3), condition=%test, body=%token, metadata={op_name="f/while"}
}
"""


def test_a_loop_of_a_known_scope_is_multiplied_out_and_optional():
    """A token reads all of 6 * 8 numbers, and a row of 8 in each of at most 5 turns."""
    found, alone = analyse(SCOPED, {"my": 5}), analyse(SCOPED)
    assert (found.once, found.each, found.optional) == (0, 4 * (48 + 5 * 8), 4 * 5 * 8)
    assert (alone.each, alone.optional) == (4 * (48 + 8), 0)


GROUPS = {
    "replica_groups={{0,2},{1,3}}": ((0, 2), (1, 3)),
    "replica_groups=[2,3]<=[6]": ((0, 1, 2), (3, 4, 5)),
    "replica_groups=[2,2]<=[2,2]T(1,0)": ((0, 2), (1, 3)),
    "replica_groups=mesh['a'=2,'b'=3] {'a'}": ((0, 3), (1, 4), (2, 5)),
    "replica_groups=mesh['a'=2,'b'=3] {'b'}": ((0, 1, 2), (3, 4, 5)),
    "replica_groups=mesh['a'=8] {'a':(2)2}": ((0, 2), (1, 3), (4, 6), (5, 7)),
    "replica_groups={}": (tuple(range(8)),),
}


@pytest.mark.parametrize("said", GROUPS)
def test_who_takes_part_is_read_in_every_spelling(said):
    line = f"  ROOT %r = f32[6]{{0}} all-reduce(%p), channel_id=1, {said}\n"
    hlo = f"HloModule m, num_partitions=8\n\nENTRY %main (p: f32[6]) -> f32[6] {{\n{line}}}\n"
    (one,) = analyse(hlo).collectives
    n = len(one.groups[0])
    assert one.groups == GROUPS[said] and one.size == 24 and one.wire == pytest.approx(2 * (n - 1) / n * 24)


def test_what_each_chip_receives():
    def wire(shape, opcode, more=""):
        line = f"  ROOT %r = {shape} {opcode}(%p), replica_groups=[1,4]<=[4]{more}\n"
        text = f"HloModule m, num_partitions=4\n\nENTRY %main (p: f32[6]) -> f32[6] {{\n{line}}}\n"
        return analyse(text).collectives[0].wire

    assert wire("f32[16]{0}", "all-gather") == 48  # of 64 bytes three quarters are others'
    assert wire("f32[4]{0}", "reduce-scatter") == 48
    assert wire("(f32[16]{0}, f32[4]{0})", "reduce-scatter-start") == 48
    assert wire("f32[16]{0}", "all-to-all") == 48
    assert wire("f32[16]{0}", "all-reduce") == 96
    assert wire("(f32[16]{0}, f32[8]{0})", "all-reduce-start") == 144  # of several: its tuple has results alone


def test_a_sum_between_slices_is_a_message_of_the_hosts():
    line = (
        "  ROOT %r = (f32[8,4]{1,0}, u32[]{:S(2)}, token[]) recv(%a), channel_id=1, is_host_transfer=true, "
        'frontend_attributes={_xla_megascale_transfer_type="ALL_REDUCE"}\n'
    )
    hlo = f"HloModule m, num_partitions=4\n\nENTRY %main (p: f32[6]) -> f32[6] {{\n{line}}}\n"
    found = analyse(hlo)
    assert found.collectives == (Collective("all-reduce", 128, 128, (), 1, False),) and found.once == 0
