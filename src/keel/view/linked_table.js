// The table of NiceGUI (a QTable) with the cells of one column as links.
export default {
  template: `
    <q-table>
      <template #[cell]="slot">
        <q-td :props="slot"><a :href="slot.row.link" @click.stop>{{ slot.value }}</a></q-td>
      </template>
    </q-table>
  `,
  props: { linked: String },
  computed: {
    cell() {
      return "body-cell-" + this.linked;
    },
  },
};
