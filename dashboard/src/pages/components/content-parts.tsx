import { ActionsHead, Bar, Code, Empty, Facts, Term, Time, Title } from "../../ui/basics";
import { STATE_ORDER, StateLabel } from "../../ui/states";
import { Listing, Pages, Table } from "../../ui/table";
import { Part } from "./part";
import { FACTS, HOSTILE, LONG, ONE_WORD } from "./samples";

const NOTHING = { data: { data: [] }, error: undefined, reload: () => undefined };
const FAILED = { data: undefined, error: new Error("The list could not be read."), reload: () => undefined };
const COMMAND = "bitfoundry submit /models/SmolLM2-135M-Instruct --quant_scheme w4a16 --wait";

export function ContentParts() {
  return (
    <>
      <Part name="Title, long, with a button">
        <Title extra={<button type="button">Pause</button>}>{LONG}</Title>
      </Part>
      <Part name="Title, hostile and narrow" isNarrow>
        <Title>{HOSTILE + ONE_WORD}</Title>
      </Part>
      <Part name="StateLabel">
        <div className="row">
          {STATE_ORDER.map((state) => (
            <StateLabel key={state} state={state} />
          ))}
        </div>
      </Part>
      <Part name="Time">
        <p>
          <Time at={null} />
        </p>
        {["2026-11-26T07:59:58Z", "2026-11-26T07:15:00Z", "2026-11-22T08:00:00Z", "2026-11-27T08:00:00Z"].map((at) => (
          <p key={at}>
            <Time at={at} />
          </p>
        ))}
      </Part>
      <Part name="Bar">
        <p>
          <Bar done={0} total={0} label="Nothing known" />
        </p>
        <p>
          <Bar done={12} total={30} label="Block 12 of 30" />
        </p>
        <p>
          <Bar done={40} total={30} label="More than all" />
        </p>
      </Part>
      <Part name="Facts">
        <Facts facts={FACTS} />
      </Part>
      <Part name="Facts, narrow" isNarrow>
        <Facts facts={FACTS} />
      </Part>
      <Part name="Term">
        <p>
          <Term>Top-1 agreement</Term>, <Term>no term</Term>
        </p>
      </Part>
      <Part name="Facts, empty">
        <Facts facts={[]} />
      </Part>
      <Part name="Code">
        <Code text={COMMAND} label="Command" />
        <Code text={Array.from({ length: 40 }, (_, line) => `line ${line + 1}`).join("\n")} label="Many lines" />
      </Part>
      <Part name="Code, narrow and hostile" isNarrow>
        <Code text={`${HOSTILE}\n${ONE_WORD}`} label="Hostile text" />
      </Part>
      <Part name="Table, wider than a phone">
        <TableSample />
      </Part>
      <Part name="Listing, empty">
        <Listing query={NOTHING} empty={<Empty>No models yet.</Empty>} head={<th>Name</th>} row={() => null} />
      </Part>
      <Part name="Listing, failed">
        <Listing query={FAILED} empty={null} head={<th>Name</th>} row={() => null} />
      </Part>
      <Part name="Pages, the first one">
        <Pages back={undefined} next={<a href="#next">Older →</a>} />
      </Part>
    </>
  );
}

function TableSample() {
  const names = ["nightly", HOSTILE, ONE_WORD];
  return (
    <Table
      head={
        <>
          <th>Name</th>
          <th>State</th>
          <th className="number">Size</th>
          <th>Created</th>
          <ActionsHead />
        </>
      }
    >
      {names.map((name) => (
        <tr key={name}>
          <td className="clip" style={{ maxWidth: "12rem" }}>
            {name}
          </td>
          <td className="nowrap">
            <StateLabel state="succeeded" />
          </td>
          <td className="number">90.5 MB</td>
          <td className="nowrap">
            <Time at="2026-11-22T08:00:00Z" />
          </td>
          <td>
            <button type="button" className="small">
              Open
            </button>
          </td>
        </tr>
      ))}
    </Table>
  );
}
