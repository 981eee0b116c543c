// The table of NiceGUI (a QTable) with the cells of one column as links.
export default {
  template: `
    <q-table v-bind="{...$attrs, columns}">
      <template #[cell]="slot">
        <q-td :props="slot"><a :href="slot.row.link" @click.stop>{{ slot.value }}</a></q-td>
      </template>
      <template #body-cell-curve="slot">
        <q-td :props="slot"><svg v-if="slot.value" viewBox="0 -1 100 22" preserveAspectRatio="none"
          role="img" :aria-label="'curve of ' + slot.row.measure">
          <polyline :points="slot.value" vector-effect="non-scaling-stroke" /></svg></q-td>
      </template>
    </q-table>
  `,
  inheritAttrs: false,
  props: { linked: String },
  // A browser takes the focus from an element that moves, as the rows of a sorted table do.
  beforeUpdate() {
    const active = document.activeElement;
    this.focused = this.$el.contains(active) ? active : null;
  },
  updated() {
    if (this.focused?.isConnected) this.focused.focus({ preventScroll: true });
  },
  computed: {
    // Texts with numbers are sorted by these: run-2 before run-10.
    columns() {
      const natural = (a, b) =>
        String(a ?? "").localeCompare(String(b ?? ""), undefined, { numeric: true });
      return this.$attrs.columns.map((one) =>
        one.align === "right" ? one : { ...one, sort: natural });
    },
    cell() {
      return "body-cell-" + this.linked;
    },
  },
};
