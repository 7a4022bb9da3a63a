"""What moves between chips is read off the compiler's own text."""

from grpojax.tools.hlo import Traffic, analyse, by_kind

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
